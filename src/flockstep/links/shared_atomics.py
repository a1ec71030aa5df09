"""The signals of `shared_futex`, compiled by numba: with atomic operations, and without a call into the kernel where no
process sleeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from flockstep.arrays.kernels.jit import jit
from flockstep.links.shared_futex import ALL, FUTEX, LINE, WAIT, WAKE

SLEEPERS = 1
"""Offset, in int32 elements from a process's counter, of the number of processes that sleep until the counter is
raised.
"""
_built_in = cast(Callable[[Callable[..., Any]], Any], intrinsic)
_yield: Any = types.ExternalFunction("sched_yield", types.int32())
_clock: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
_syscall: Any = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))


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
        _syscall(FUTEX, _address(counters, who * LINE), WAKE, ALL, 0, 0, 0)


@jit
def sleep_until(counters: Any, who: int, value: int, how: Any) -> bool:
    """Sleep until the counter of process `who` has reached `value`; False if one sleep was not enough."""
    for _ in range(how[1]):
        _yield()
        if reached(counters, who, value):
            return True
    add(counters, who * LINE + SLEEPERS, numba.int32(1))
    seen = load(counters, who * LINE)
    if (numba.int64(seen) - value) & 0xFFFFFFFF >= 0x80000000:
        _syscall(FUTEX, _address(counters, who * LINE), WAIT, numba.int64(seen), _address64(how[2:4]), 0, 0)
    add(counters, who * LINE + SLEEPERS, numba.int32(-1))
    return reached(counters, who, value)


@_built_in
def _address64(_context: Any, array: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, ir.IntType(64))

    return types.int64(array), generate


@jit
def now(how: Any) -> int:
    """Return the nanoseconds of the system's monotonic clock."""
    _clock(1, _address64(how[5:7]))
    return int(how[5] * 1_000_000_000 + how[6])
