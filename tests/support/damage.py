"""What fuzzing shares: inputs with damage, one attempt to read each, and what came of it."""

from __future__ import annotations

import os
import random
import signal
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import numpy as np

from flockstep.errors import FlockstepError
from support.processes import PATIENCE

Change = Callable[[bytes, random.Random], bytes]
"""Damages bytes as a seed draws."""


class Hangs(BaseException):
    """Raised where reading an input takes longer than `PATIENCE`."""


@dataclass(frozen=True)
class Attempt:
    """What came of reading one damaged input."""

    subject: str
    number: int
    data: bytes
    taken: bool
    """Whether it was read as a value; otherwise an error of flockstep refused it, or reading raised `error`."""
    seconds: float
    peak: int
    """Bytes of memory that reading took; 0 unless memory is traced."""
    error: BaseException | None

    def __str__(self) -> str:
        return (
            f"{self.subject}, number {self.number}: {type(self.error).__name__}: {self.error} for {self.data[:3000]!r}"
        )


@contextmanager
def within_patience() -> Iterator[None]:
    """Raise `Hangs` if the body hangs."""

    def hangs(signum: int, frame: FrameType | None) -> None:
        raise Hangs("it hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attempt(subject: str, number: int, data: bytes, read: Callable[[], object]) -> Attempt:
    """Read one input; an error that is none of flockstep's is kept, and so is a hang."""
    if tracemalloc.is_tracing():
        tracemalloc.reset_peak()
    memory, start = tracemalloc.get_traced_memory()[0], time.perf_counter()
    taken, error = False, None
    try:
        with within_patience(), np.errstate(all="ignore"):
            read()
        taken = True
    except FlockstepError:
        pass
    except (Exception, Hangs) as found:  # noqa: BLE001 - what is looked for
        error = found
    seconds = time.perf_counter() - start
    return Attempt(subject, number, data, taken, seconds, tracemalloc.get_traced_memory()[1] - memory, error)


def resident() -> int:
    """Resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
