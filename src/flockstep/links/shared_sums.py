"""Sums over arrays in memory that all processes of a group can write, equal bit for bit to a ring all-reduce.

A group's arrays lie in one segment; the array of process p starts at element p * stride + offset. Part c of n of the
array (`bounds` holds the n + 1 limits) is summed in the order c, c+1, …, c-1 of processes, and divided by `divisor`.

`members` is what all calls of a process for one dtype share: the segment as one array, the stride, the counters, the
number of this process, and the parameters of waiting that `shared_signals.manner` returned. It is a plain tuple, which
numba takes faster than as many arguments.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flockstep.arrays.kernels.jit import beside, jit
from flockstep.links.shared_signals import differs, raise_to, say, wait_for_all

MISMATCH = -2
"""Return value of a sum that is refused, because another process's array has another size, dtype, offset or divisor."""
SLOTS = 3
"""Number of slots that each process has for summing arrays outside of the segment."""
BLOCK = 2048
"""Number of elements that are summed at a time, chosen to fit into the first-level cache."""


def _plain_pair(a: Any, b: Any, divisor: Any) -> None:
    a += b
    _divide(a, divisor)
    b[:] = a


@beside(_plain_pair)
def _pair(a: Any, b: Any, divisor: Any) -> None:
    """a, b ← (a + b) / divisor, elementwise."""
    if divisor == 1:
        for i in range(len(a)):
            total = a[i] + b[i]
            a[i] = total
            b[i] = total
    else:
        for i in range(len(a)):
            total = (a[i] + b[i]) / divisor
            a[i] = total
            b[i] = total


def _plain_copy(out: Any, given: Any) -> None:
    out[:] = given


@beside(_plain_copy)
def _copy(out: Any, given: Any) -> None:
    for i in range(len(out)):
        out[i] = given[i]


def _plain_add(out: Any, more: Any) -> None:
    out += more


@beside(_plain_add)
def _add(out: Any, more: Any) -> None:
    for i in range(len(out)):
        out[i] += more[i]


def _plain_divide(total: Any, divisor: Any) -> None:
    if divisor != 1:
        total /= divisor


@beside(_plain_divide)
def _divide(total: Any, divisor: Any) -> None:
    """Divide an array in place."""
    if divisor != 1:
        for i in range(len(total)):
            total[i] /= divisor


def _plain_both(a: Any, b: Any, out: Any) -> None:
    np.add(a, b, out=out)


@beside(_plain_both)
def _both(a: Any, b: Any, out: Any) -> None:
    """out ← a + b, elementwise."""
    for i in range(len(out)):
        out[i] = a[i] + b[i]


@jit
def _sum(heap: Any, stride: int, offset: int, start: int, first: int, n: int, divisor: Any, out: Any) -> None:
    """out ← the sum of the elements from `start` on over all processes, beginning with process `first`."""
    for low in range(start, start + len(out), BLOCK):
        high = min(low + BLOCK, start + len(out))
        total = out[low - start : high - start]
        base, other = first * stride + offset, (first + 1) % n * stride + offset
        _both(heap[base + low : base + high], heap[other + low : other + high], total)
        for hop in range(2, n):
            base = (first + hop) % n * stride + offset
            _add(total, heap[base + low : base + high])
        _divide(total, divisor)


@jit
def in_place(members: Any, offset: int, bounds: Any, turn: int, stage: int, divisor: Any) -> int:
    """Replace the array of every process with the sum.

    Returns 0 when done, the stage to continue with after a long wait, or MISMATCH. `turn` is the counter's value before
    the call; afterwards the counter is two higher.
    """
    heap, stride, counters, me, how = members
    n = len(bounds) - 1
    if stage <= 1:
        late = _meet(members, offset, bounds, turn, stage, divisor)
        if late != 0:
            return late
        if n == 2:
            low, high = offset + bounds[me], offset + bounds[me + 1]
            _pair(
                heap[me * stride + low : me * stride + high],
                heap[(1 - me) * stride + low : (1 - me) * stride + high],
                divisor,
            )
        else:
            _reduce_part(heap, stride, offset, bounds, me, n, divisor)
        raise_to(counters, me, turn + 2)
    return 0 if wait_for_all(counters, me, n, turn + 2, how) < 0 else 2


@jit
def sum_part(members: Any, offset: int, bounds: Any, turn: int, stage: int, divisor: Any) -> int:
    """Replace part `me` of this process's array with the sum: the first half of `in_place`, with the same arguments.

    `share_part` is the second half. Between the two calls, this process may change part `me`. Returns 0 when done, 1
    after a long wait, or MISMATCH; the counter is one higher afterwards.
    """
    heap, stride, _, me, _ = members
    late = _meet(members, offset, bounds, turn, stage, divisor)
    if late == 0:
        for low in range(bounds[me], bounds[me + 1], BLOCK):
            _sum_block(heap, stride, offset, low, min(low + BLOCK, bounds[me + 1]), me, len(bounds) - 1)
    return late


@jit
def share_part(members: Any, offset: int, bounds: Any, turn: int, stage: int, divisor: Any) -> int:
    """Divide part `me` of the sum by `divisor`, and write it to the arrays of all processes; `turn` is as in
    `sum_part`.

    Returns 0 when all processes have done so, or 2 after a long wait.
    """
    heap, stride, counters, me, how = members
    n = len(bounds) - 1
    if stage == 0:
        for low in range(bounds[me], bounds[me + 1], BLOCK):
            _share_block(heap, stride, offset, low, min(low + BLOCK, bounds[me + 1]), me, n, divisor)
        raise_to(counters, me, turn + 2)
    return 0 if wait_for_all(counters, me, n, turn + 2, how) < 0 else 2


@jit
def mean_part(members: Any, offset: int, bounds: Any, turn: int, stage: int, divisor: Any, out: Any) -> int:
    """Write part `me` of the sum, added in the order of processes and divided by `divisor`, to `out`; no process's
    array changes. The other arguments are those of `in_place`.

    Returns 0 when done, 1 after a long wait, or MISMATCH; the counter is one higher afterwards. `arrive` must follow.
    """
    heap, stride, _, me, _ = members
    late = _meet(members, offset, bounds, turn, stage, divisor)
    if late == 0:
        _sum(heap, stride, offset + bounds[me], 0, 0, len(bounds) - 1, divisor, out)
    return late


@jit
def arrive(counters: Any, me: int, n: int, turn: int, stage: int, how: Any) -> int:
    """Raise this process's counter to `turn`, and wait for the counters of all n processes; return 0, or 1 after a long
    wait.
    """
    if stage == 0:
        raise_to(counters, me, turn)
    return 0 if wait_for_all(counters, me, n, turn, how) < 0 else 1


@jit
def _kind(heap: Any, divisor: Any) -> int:
    """Return a number for divisor and dtype, which must be equal in all processes."""
    return int(int(divisor) * 16 + heap.itemsize)


@jit
def _meet(members: Any, offset: int, bounds: Any, turn: int, stage: int, divisor: Any) -> int:
    """Wait until the arrays of all processes are ready: 0 when they are, 1 after a long wait, or MISMATCH."""
    heap, _, counters, me, how = members
    n = len(bounds) - 1
    if stage == 0:
        say(counters, me, turn + 1, bounds[n], offset, _kind(heap, divisor))
        raise_to(counters, me, turn + 1)
    if wait_for_all(counters, me, n, turn + 1, how) >= 0:
        return 1
    return MISMATCH if differs(counters, me, n, turn + 1) >= 0 else 0


@jit
def _reduce_part(heap: Any, stride: int, offset: int, bounds: Any, me: int, n: int, divisor: Any) -> None:
    """Sum part `me` and write the sum to the arrays of all processes."""
    for low in range(bounds[me], bounds[me + 1], BLOCK):
        high = min(low + BLOCK, bounds[me + 1])
        _sum_block(heap, stride, offset, low, high, me, n)
        _share_block(heap, stride, offset, low, high, me, n, divisor)


@jit
def _sum_block(heap: Any, stride: int, offset: int, low: int, high: int, me: int, n: int) -> None:
    """Add elements low..high-1 of all other processes to those of process `me`."""
    base = me * stride + offset
    total = heap[base + low : base + high]
    for hop in range(1, n):
        base = (me + hop) % n * stride + offset
        _add(total, heap[base + low : base + high])


@jit
def _share_block(heap: Any, stride: int, offset: int, low: int, high: int, me: int, n: int, divisor: Any) -> None:
    """Divide elements low..high-1 of process `me`, and copy them to all other processes."""
    base = me * stride + offset
    total = heap[base + low : base + high]
    _divide(total, divisor)
    for hop in range(1, n):
        base = (me + hop) % n * stride + offset
        _copy(heap[base + low : base + high], total)


@jit
def through_slots(
    members: Any, room: int, array: Any, pieces: int, bounds: Any, turn: int, at: int, divisor: Any
) -> int:
    """Replace `array`, which may lie anywhere, with the sum, in `pieces` of `room` elements, and one turn more.

    In a turn, every process sums its share of the piece that was announced in the turn before, writes the sum to its
    own slot, and copies the next piece to its next slot. Once all processes have done so, it copies the other shares
    of the sum. A slot is written again three turns later, when all processes have read it. 0 `pieces`: every process
    sums the whole array, in one turn. `turn` is the counter's value before the call.

    Returns -1 when done, MISMATCH, or the `at` with which to continue after a long wait; `at` is 0 in the first call.
    """
    heap, stride, counters, me, how = members
    n, size, own = len(bounds) - 1, len(array), me * stride
    for number in range(max(at - 1, 0), pieces + 1):
        low, high = max(number - 1, 0) * room, min(number * room, size)  # the piece that was announced before
        slot, now = (turn + number) % SLOTS * room - low, turn + number + 1
        if number >= at:
            _sum_share(members, slot, _share(low, high, me, n), bounds, divisor, array)
            if number < max(pieces, 1):
                following = now % SLOTS * room - high
                end = min(high + room, size)
                start, stop = _share(high, end, me, n if pieces > 0 else 0)
                _copy(heap[own + following + high : own + following + start], array[high:start])
                _copy(heap[own + following + stop : own + following + end], array[stop:end])
            say(counters, me, now, size, -1, _kind(heap, divisor))
            raise_to(counters, me, now)
        if wait_for_all(counters, me, n, now, how) >= 0:
            return number + 1
        if differs(counters, me, n, now) >= 0:
            return MISMATCH
        for hop in range(1, n):
            who = (me + hop) % n
            start, stop = _share(low, high, who, n)
            base = who * stride + slot
            _copy(array[start:stop], heap[base + start : base + stop])
    if pieces == 0:
        for c in range(n):
            start, stop = bounds[c], bounds[c + 1]
            _sum(heap, stride, (turn + 1) % SLOTS * room, start, c, n, divisor, array[start:stop])
    return -1


@jit
def _share(low: int, high: int, who: int, n: int) -> tuple[int, int]:
    """Return the limits of the share of elements low..high-1 that process `who` sums; an empty share if n is 0."""
    if n == 0:
        return high, high
    length = -(-(high - low) // n)
    return min(low + who * length, high), min(low + who * length + length, high)


@jit
def _sum_share(members: Any, slot: int, share: tuple[int, int], bounds: Any, divisor: Any, array: Any) -> None:
    """Write the elements of the sum within the limits `share` to `array` and to the slot of process `me`, whose own
    elements are those of `array`.
    """
    heap, stride, _, me, _ = members
    n, (start, stop) = len(bounds) - 1, share
    for c in range(n):
        end = min(stop, bounds[c + 1])
        for low in range(max(start, bounds[c]), end, BLOCK):
            high = min(low + BLOCK, end)
            total = heap[me * stride + slot + low : me * stride + slot + high]
            _both(
                _of(heap, stride, slot, low, high, c, me, array),
                _of(heap, stride, slot, low, high, (c + 1) % n, me, array),
                total,
            )
            for hop in range(2, n):
                _add(total, _of(heap, stride, slot, low, high, (c + hop) % n, me, array))
            _divide(total, divisor)
            _copy(array[low:high], total)


@jit
def _of(heap: Any, stride: int, slot: int, low: int, high: int, who: int, me: int, array: Any) -> Any:
    """Elements low..high-1 of process `who`."""
    return array[low:high] if who == me else heap[who * stride + slot + low : who * stride + slot + high]
