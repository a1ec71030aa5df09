"""Signals between processes that share memory: counters that one process raises and others wait for.

A wait first polls the counter for a moment, then yields the core, then sleeps in the kernel until it is woken. A wait
takes microseconds if the other process is about to raise the counter, and otherwise causes no load. Requires Linux on
x86-64 or AArch64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flockstep.arrays.kernels.jit import COMPILES, jit
from flockstep.links.shared_futex import LINE
from flockstep.system import cores

if COMPILES and not TYPE_CHECKING:
    from flockstep.links.shared_atomics import now, raise_to, reached, sleep_until
else:
    from flockstep.links.shared_futex import now, raise_to, reached, sleep_until
__all__ = ["differs", "manner", "raise_to", "reached", "say", "wait_for_all"]

SAID = 2
"""Offset, in int32 elements from a process's counter, of the numbers that `say` stores: three for even turns, then
three for odd turns.
"""
SLICE = 0.02
"""Maximum number of seconds of one sleep; a process that waits longer returns to its caller between two sleeps."""


def manner(processes: int) -> Any:
    """Return the parameters of waiting for `processes` processes, int64 (7,): the number of polls and of yields before
    sleeping (fewer if there are more processes than cores); the longest sleep, in seconds and nanoseconds; the
    nanoseconds waited so far; and two elements for a reading of the clock.
    """
    looks, yields = (2000, 40) if processes <= cores() else (50, 12)
    return np.array([looks, yields, 0, int(SLICE * 1e9), 0, 0, 0], np.int64)


@jit
def _look(counters: Any, who: int, value: int, times: int) -> bool:
    """Poll the counter of process `who` up to `times` times; return whether it has reached `value`."""
    for _ in range(times):  # noqa: SIM110 - numba has no any()
        if reached(counters, who, value):
            return True
    return False


@jit
def say(counters: Any, who: int, turn: int, first: int, second: int, third: int) -> None:
    """Store three numbers beside this process's counter, for processes that read them at `turn`."""
    base = who * LINE + SAID + 3 * (turn & 1)
    counters[base] = np.int32(first)
    counters[base + 1] = np.int32(second)
    counters[base + 2] = np.int32(third)


@jit
def differs(counters: Any, me: int, n: int, turn: int) -> int:
    """Return the first of processes 0..n-1 whose stored numbers differ from the numbers of this process, or -1."""
    shift = SAID + 3 * (turn & 1)
    for who in range(n):
        for i in range(3):
            if counters[who * LINE + shift + i] != counters[me * LINE + shift + i]:
                return who
    return -1


@jit
def wait_for_all(counters: Any, me: int, n: int, value: int, how: Any) -> int:
    """Wait for the counters of processes 0..n-1; return the first process that has not arrived after one sleep, or
    -1.

    `how` holds the parameters that `manner` returned. The nanoseconds waited are added to `how[4]`, unless polling was
    enough.
    """
    start, late = 0, -1
    for hop in range(1, n):
        who = (me + hop) % n
        if _look(counters, who, value, how[0]):
            continue
        if start == 0:
            start = now(how)
        if not sleep_until(counters, who, value, how):
            late = who
            break
    if start != 0:
        how[4] += now(how) - start
    return late
