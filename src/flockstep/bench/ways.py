"""What is measured: one way of doing a thing among processes of one host."""

from __future__ import annotations

import importlib.util
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flockstep.arrays.schema import FlatArray


@dataclass(frozen=True)
class Place:
    """Where a process stands."""

    rank: int
    workers: int
    folder: Path
    """Private to the measurement."""
    segment: str
    """Address of memory that all of them share."""
    largest: int
    """Bytes of the largest array."""


class Way(ABC):
    """One entry of a measurement, in the process that starts the others; `party` is made in each of these."""

    name: str
    packages: tuple[str, ...] = ()
    """What has to be installed for it, by pip."""
    modules: tuple[str, ...] = ()
    """What must be found for it to run."""
    by_mpirun = False

    @property
    def missing(self) -> str:
        """How to install what it lacks; nothing if all is there."""
        absent = [module for module in self.modules if importlib.util.find_spec(module) is None]
        return f"pip install {' '.join(self.packages)}" if absent else ""

    @abstractmethod
    def party(self, place: Place) -> Party:
        """This process's end of it."""


class Party(ABC):
    """One process's end of a way."""

    told: str = ""
    """What the others have to know to connect."""

    def connect(self, told: Sequence[str]) -> None:  # noqa: B027 - most have nothing to connect
        """Connect to the others, given what each has told, by rank."""

    @abstractmethod
    def run(self, size: int, calls: int) -> float:
        """Do it so many times with `size` float32; the seconds of one."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Let go of what it holds."""


class Summing(Party):
    """An end of an all-reduce: `all_reduce` on an array that `buffer` gives."""

    def buffer(self, size: int) -> FlatArray:
        """(size,) float32; the same one every time."""
        if not hasattr(self, "_own") or len(self._own) < size:
            self._own: FlatArray = np.zeros(size, np.float32)
        return self._own[:size]

    @abstractmethod
    def all_reduce(self, array: FlatArray) -> None:
        """Replace `array` by the sum over all processes."""

    workers: int

    def run(self, size: int, calls: int) -> float:
        """Once to see that the sum is right, once with zeros, which brings all to one point, then against the clock."""
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
    """Mean time of one call, over so many."""
    start = time.perf_counter()
    for _ in range(calls):
        action()
    return (time.perf_counter() - start) / calls
