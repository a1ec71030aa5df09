"""Copies of large arrays lie in memory that is used again, but never while anyone can still see it."""

from __future__ import annotations

import numpy as np

from flockstep.links.copies import KEPT, REUSED, BufferPool

SIZE = REUSED // 8


def address(array):
    return array.__array_interface__["data"][0]


def test_a_copy_is_read_only_and_stays_what_it_was():
    copies, array = BufferPool(), np.arange(SIZE, dtype=float)
    copy = copies.frozen(array)
    array += 1
    assert not copy.flags.writeable
    assert np.array_equal(copy, np.arange(SIZE))


def test_memory_is_used_again_once_nobody_sees_it():
    """What keeps it from being used: the copy, a part of it, or its bytes on their way."""
    copies, array = BufferPool(), np.zeros(SIZE)
    first = copies.frozen(array)
    place = address(first)
    for keep in (lambda copy: copy, lambda copy: copy[3:5], lambda copy: copy.data.cast("B")):
        kept = keep(first)
        del first
        second = copies.frozen(array)
        assert address(second) != place
        del kept, second
        first = copies.frozen(array)
        assert address(first) == place


def test_no_more_buffers_are_kept_than_needed():
    copies, array = BufferPool(), np.zeros(SIZE)
    held = [copies.frozen(array) for _ in range(KEPT + 3)]
    assert len({address(copy) for copy in held}) == KEPT + 3
    assert [len(buffers) for buffers in copies._buffers.values()] == [KEPT]
    assert len({address(copies.frozen(array)) for _ in range(3)}) <= 3


def test_small_and_unchangeable_arrays_are_not_kept():
    copies = BufferPool()
    fixed = np.zeros(SIZE)
    fixed.flags.writeable = False
    assert copies.frozen(fixed) is fixed
    assert np.array_equal(copies.frozen(np.arange(3)), np.arange(3))
    assert not copies._buffers
