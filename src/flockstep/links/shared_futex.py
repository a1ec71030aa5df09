"""Counters in shared memory that one process raises and others sleep on, with plain reads and writes.

`shared_atomics` has the same functions, compiled. Plain writes reach other processes in their order on x86-64 only.
"""

from __future__ import annotations

import ctypes
import os
import platform
import time
from functools import cache
from typing import Any

import numpy as np

LINE = 32
"""Distance between the counters of two processes in int32 elements: two cache lines."""
FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), -1)
WAIT, WAKE, ALL = 0, 1, 2**31 - 1


@cache
def _syscall() -> Any:
    return ctypes.CDLL(None).syscall


def _futex(counters: Any, who: int, operation: int, value: int, timeout: int | None) -> None:
    address = counters.ctypes.data + 4 * LINE * who
    _syscall()(*map(ctypes.c_long, (FUTEX, address, operation, value)), ctypes.c_void_p(timeout), None, 0)


def reached(counters: Any, who: int, value: int) -> bool:
    """Return whether the counter of process `who` has reached `value`; counters wrap around."""
    return (int(counters[who * LINE]) - int(value)) & 0xFFFFFFFF < 0x80000000


def raise_to(counters: Any, who: int, value: int) -> None:
    """Raise this process's own counter to a value, and wake the processes that wait for it."""
    counters[who * LINE] = np.int64(value).astype(np.int32)
    _futex(counters, who, WAKE, ALL, None)  # always: a count of sleepers would need atomic additions


def sleep_until(counters: Any, who: int, value: int, how: Any) -> bool:
    """Sleep until the counter of process `who` has reached `value`; False if one sleep was not enough."""
    for _ in range(how[1]):
        os.sched_yield()
        if reached(counters, who, value):
            return True
    seen = int(counters[who * LINE])
    if not reached(counters, who, value):  # the kernel sleeps only while the counter is still `seen`
        _futex(counters, who, WAIT, seen, how[2:4].ctypes.data)
    return reached(counters, who, value)


def now(how: Any) -> int:
    """Return the nanoseconds of the system's monotonic clock."""
    return time.monotonic_ns()
