"""The interface of an implementation that a benchmark runs in several processes of one host."""

from __future__ import annotations

import importlib.util
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flockstep.arrays.schema import FlatArray


@dataclass(frozen=True)
class BenchProcess:
    """Rank of one process of a benchmark, with the folder, memory segment and secret that the processes share."""

    rank: int
    workers: int
    folder: Path
    """Folder that only the processes of this benchmark use."""
    segment: str
    """Address of a memory segment that all processes share."""
    largest: int
    """Size of the largest array in bytes."""
    secret: bytes = field(default=b"", repr=False)
    """Secret of the benchmark, which both ends of a TCP connection must know."""


@dataclass(frozen=True)
class Implementation:
    """One implementation in a benchmark; `worker` is called in each of its processes."""

    name: str
    worker: Callable[[BenchProcess], BenchWorker]
    """Creates the part of the measurement that runs in a process."""
    packages: tuple[str, ...] = ()
    """Names of the packages that pip must install before the implementation runs."""
    modules: tuple[str, ...] = ()
    """Names of the modules that must be importable before the implementation runs."""
    by_mpirun: bool = False
    needs_linux: bool = False
    """Whether the implementation uses shared memory, which only Linux provides."""

    @property
    def missing(self) -> str:
        """Command that installs the missing packages, or the reason why the implementation cannot run on this system;
        empty if it can run.
        """
        if self.needs_linux and sys.platform != "linux":
            return "needs Linux"
        absent = [module for module in self.modules if importlib.util.find_spec(module) is None]
        return f"pip install {' '.join(self.packages)}" if absent else ""


class BenchWorker(ABC):
    """The part of a measurement that runs in one process."""

    address: str = ""
    """Address under which the other processes reach this process."""

    def connect(self, addresses: Sequence[str]) -> None:  # noqa: B027 - most have nothing to connect
        """Connect to the other processes; `addresses` holds the address of each process, in order of rank."""

    @abstractmethod
    def run(self, size: int, calls: int) -> float:
        """Perform `calls` calls with an array of `size` float32 elements; return the mean seconds of one call."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Release the sockets and the shared memory of this process."""


class Summing(BenchWorker):
    """The part of an all-reduce measurement that runs in one process: `all_reduce` is called on the array from
    `buffer`.
    """

    def buffer(self, size: int) -> FlatArray:
        """Return the process's array, of shape (size,) and float32; every call returns the same memory."""
        if not hasattr(self, "_own") or len(self._own) < size:
            self._own: FlatArray = np.zeros(size, np.float32)
        return self._own[:size]

    @abstractmethod
    def all_reduce(self, array: FlatArray) -> None:
        """Replace `array` with the sum over all processes."""

    workers: int

    def run(self, size: int, calls: int) -> float:
        """Check the sum of one all-reduce, synchronize the processes by an all-reduce of zeros, then measure.

        Return the mean seconds of one call.
        """
        array = self.buffer(size)
        array[:] = 1
        self.all_reduce(array)
        if not (array == self.workers).all():
            raise ArithmeticError(
                f"{type(self).__name__} sums {self.workers} ones to {array[array != self.workers][0]}"
            )
        array[:] = 0
        self.all_reduce(array)
        return seconds_of(lambda: self.all_reduce(array), calls)


def seconds_of(action: Callable[[], object], calls: int) -> float:
    """Call `action` `calls` times, and return the mean seconds of one call."""
    start = time.perf_counter()
    for _ in range(calls):
        action()
    return (time.perf_counter() - start) / calls
