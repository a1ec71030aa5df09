"""Signals between processes that share memory: counters that one process raises and others wait for.

A wait first polls the counter for a moment, then yields the core, then sleeps in the kernel until it is woken. A wait
takes microseconds if the other process is about to raise the counter, and otherwise causes no load. Requires Linux on
x86-64 or AArch64.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from flockstep.arrays.kernels.jit import jit

LINE = 32
"""Distance between the counters of two processes in int32 elements: two cache lines."""
SLEEPERS = 1
"""Offset, in int32 elements from a process's counter, of the number of processes that sleep until the counter is
raised.
"""
SAID = 2
"""Offset, in int32 elements from a process's counter, of the numbers that `say` stores: three for even turns, then
three for odd turns.
"""
SLICE = 0.02
"""Maximum number of seconds of one sleep; a process that waits longer returns to its caller between two sleeps."""
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), -1)
_WAIT, _WAKE, _ALL = 0, 1, 2**31 - 1

_built_in = cast(Callable[[Callable[..., Any]], Any], intrinsic)
_yield: Any = types.ExternalFunction("sched_yield", types.int32())
_clock: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
_syscall: Any = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))


def manner(processes: int) -> Any:
    """Return the parameters of waiting for `processes` processes, int64 (7,): the number of polls and of yields before
    sleeping (fewer if there are more processes than cores); the longest sleep, in seconds and nanoseconds; the
    nanoseconds waited so far; and two elements for a reading of the clock.
    """
    looks, yields = (2000, 40) if processes <= len(os.sched_getaffinity(0)) else (50, 12)
    return np.array([looks, yields, 0, int(SLICE * 1e9), 0, 0, 0], np.int64)


def _pointer(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [index])


@_built_in
def load(_context: Any, array: Any, index: Any) -> Any:
    """Return an element of an int32 array that another process may have written, by an atomic load; later accesses are
    not moved before it.

    Nor is the load moved before earlier stores and additions of this process, so a process that goes to sleep and the
    one that has to wake it cannot miss each other.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(context, builder, signature.args[0], *args), "seq_cst", 4)

    return types.int32(array, types.intp), generate


@_built_in
def store(_context: Any, array: Any, index: Any, value: Any) -> Any:
    """Replace an element of an int32 array atomically, and return the old value; a process that reads the new value
    sees everything written before it.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        where = _pointer(context, builder, signature.args[0], *args[:2])
        return builder.atomic_rmw("xchg", where, args[2], "seq_cst")

    return types.int32(array, types.intp, types.int32), generate


@_built_in
def add(_context: Any, array: Any, index: Any, value: Any) -> Any:
    """Add to an element of an int32 array atomically, and return the old value."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        where = _pointer(context, builder, signature.args[0], *args[:2])
        return builder.atomic_rmw("add", where, args[2], "seq_cst")

    return types.int32(array, types.intp, types.int32), generate


@_built_in
def _address(_context: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(_pointer(context, builder, signature.args[0], *args), ir.IntType(64))

    return types.int64(array, types.intp), generate


@jit
def reached(counters: Any, who: int, value: int) -> bool:
    """Return whether the counter of process `who` has reached `value`; counters wrap around."""
    return bool((numba.int64(load(counters, who * LINE)) - value) & 0xFFFFFFFF < 0x80000000)


@jit
def raise_to(counters: Any, who: int, value: int) -> None:
    """Raise this process's own counter to a value, and wake the processes that wait for it."""
    store(counters, who * LINE, numba.int32(value))
    if load(counters, who * LINE + SLEEPERS) > 0:
        _syscall(_FUTEX, _address(counters, who * LINE), _WAKE, _ALL, 0, 0, 0)


@jit
def _look(counters: Any, who: int, value: int, times: int) -> bool:
    """Poll the counter of process `who` up to `times` times; return whether it has reached `value`."""
    for _ in range(times):  # noqa: SIM110 - numba has no any()
        if reached(counters, who, value):
            return True
    return False


@jit
def _wait(counters: Any, who: int, value: int, how: Any) -> bool:
    """Sleep until the counter of process `who` has reached `value`; False if one sleep was not enough."""
    for _ in range(how[1]):
        _yield()
        if reached(counters, who, value):
            return True
    add(counters, who * LINE + SLEEPERS, numba.int32(1))
    seen = load(counters, who * LINE)
    if (numba.int64(seen) - value) & 0xFFFFFFFF >= 0x80000000:
        _syscall(_FUTEX, _address(counters, who * LINE), _WAIT, numba.int64(seen), _address64(how[2:4]), 0, 0)
    add(counters, who * LINE + SLEEPERS, numba.int32(-1))
    return reached(counters, who, value)


@_built_in
def _address64(_context: Any, array: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, ir.IntType(64))

    return types.int64(array), generate


@jit
def say(counters: Any, who: int, turn: int, first: int, second: int, third: int) -> None:
    """Store three numbers beside this process's counter, for processes that read them at `turn`."""
    base = who * LINE + SAID + 3 * (turn & 1)
    counters[base] = numba.int32(first)
    counters[base + 1] = numba.int32(second)
    counters[base + 2] = numba.int32(third)


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
def now(how: Any) -> int:
    """Return the nanoseconds of the system's monotonic clock."""
    _clock(1, _address64(how[5:7]))
    return int(how[5] * 1_000_000_000 + how[6])


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
        if not _wait(counters, who, value, how):
            late = who
            break
    if start != 0:
        how[4] += now(how) - start
    return late
