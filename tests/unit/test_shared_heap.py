"""Payloads in shared memory: what arrives, when a slot is used again, and what is refused."""

from __future__ import annotations

import gc
import mmap
import os

import numpy as np
import pytest

from flockstep.errors import ProtocolError
from flockstep.links.copies import BufferPool
from flockstep.links.shared_heap import FRONT, SLOTS, PeerMemory, SharedHeap
from flockstep.links.shared_memory import SharedMemory
from flockstep.links.wire import SenderIdentity, decode, encode
from flockstep.messages import Message, server

ROOM = 1 << 20


@pytest.fixture
def heaps():
    return {a: SharedHeap(ROOM) for a in (0, 1, server(0))}


def view(heaps, source, to, place, start, dtype, size):
    return PeerMemory(heaps[source].location, to).view(place, start, dtype, size)


def carried(heaps, array, source=0, to=1):
    """What the receiver sees of a copy of `array`."""
    copy = heaps[source].copy(array)
    place = heaps[source].place(copy)
    start = heaps[source].sent(place, to)
    return copy, view(heaps, source, to, place, start, array.dtype.name, array.size)


@pytest.mark.parametrize(("source", "to"), [(0, 1), (1, server(0)), (server(0), 0)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "uint8", "float16"])
def test_the_receiver_sees_the_senders_array(heaps, source, to, dtype):
    array = np.arange(1000).astype(dtype)
    copy, view = carried(heaps, array, source, to)
    array += 1
    assert view.dtype == dtype
    assert np.array_equal(view, np.arange(1000).astype(dtype))
    assert not view.flags.writeable
    assert not copy.flags.writeable


def test_a_slot_is_used_again_only_when_nobody_holds_it(heaps):
    copy, view = carried(heaps, np.zeros(100))
    place = heaps[0].place(copy)
    second = heaps[0].copy(np.ones(100))
    assert heaps[0].place(second) != place, "the sender itself still holds the first"
    del copy, second
    third = heaps[0].copy(np.ones(100))
    assert heaps[0].place(third) != place, "the receiver still reads it"
    part = view[10:20]
    del third, view
    gc.collect()
    fourth = heaps[0].copy(np.ones(100))
    assert heaps[0].place(fourth) != place, "a part of it is still held"
    assert not part.any()
    del fourth, part
    gc.collect()
    assert heaps[0].place(heaps[0].copy(np.ones(100))) == place


def test_two_receivers_have_to_be_done(heaps):
    copy = heaps[0].copy(np.zeros(50))
    place = heaps[0].place(copy)
    views = [view(heaps, 0, to, place, heaps[0].sent(place, to), "float64", 50) for to in (1, server(0))]
    del copy, views[0]
    gc.collect()
    assert heaps[0].place(heaps[0].copy(np.ones(50))) != place
    views.clear()
    gc.collect()
    assert heaps[0].place(heaps[0].copy(np.ones(50))) == place


def test_what_a_lost_node_held_is_free(heaps):
    copy = heaps[0].copy(np.zeros(50))
    place = heaps[0].place(copy)
    heaps[0].sent(place, 1)
    del copy
    assert heaps[0].place(heaps[0].copy(np.ones(50))) != place
    assert heaps[0].place(heaps[0].copy(np.ones(50), lost={1})) == place


def test_a_message_that_did_not_go_frees_its_slot(heaps):
    copy = heaps[0].copy(np.zeros(50))
    place = heaps[0].place(copy)
    heaps[0].sent(place, 1)
    heaps[0].sent(place, 1, -1)
    del copy
    assert heaps[0].place(heaps[0].copy(np.ones(50))) == place


def test_a_full_region_gives_none(heaps):
    held = [heaps[0].copy(np.zeros(ROOM // 4 // 8)) for _ in range(5)]
    assert [copy is None for copy in held] == [False] * 4 + [True]


def test_a_part_of_a_copy_is_no_slot(heaps):
    copy = heaps[0].copy(np.arange(100))
    assert heaps[0].place(copy[1:]) is None
    assert heaps[0].place(copy[:50]) is None
    assert heaps[0].place(np.arange(100)) is None


@pytest.mark.parametrize(
    ("place", "start", "size"),
    [(0, 0, 10), (SLOTS, FRONT, 10), (-2, FRONT, 10), (0, FRONT, -1), (0, FRONT + 4, 10), (0, 1 << 40, 10),
     (0, FRONT, ROOM), (0, -4096, 10)],
)  # fmt: skip
def test_what_cannot_be_a_slot_is_refused(heaps, place, start, size):
    assert len(view(heaps, 0, 1, 0, FRONT, "float64", 10)) == 10
    with pytest.raises(ProtocolError, match="does not exist in the heap"):
        view(heaps, 0, 1, place, start, "float64", size)


def identity(address, heap=None):
    peer_memory = {} if heap is None else {0: PeerMemory(heap.location, address)}
    return SenderIdentity("run", address, "schema", 8000, peer_memory=peer_memory)


def test_through_the_wire_only_the_header_travels(heaps):
    me, you = identity(0), identity(1, heaps[0])
    copy = heaps[0].copy(np.arange(1000.0))
    place = heaps[0].place(copy)
    header = encode(Message(0, "push", copy, number=1), me, place, heaps[0].sent(place, 1))
    assert np.array_equal(decode(header, None, 0, you).payload, np.arange(1000.0))


def test_a_slot_is_refused_where_no_memory_is_shared(heaps):
    header = encode(Message(0, "push", np.arange(1000.0), number=1), identity(0), 0, FRONT)
    with pytest.raises(ProtocolError, match="shares no memory"):
        decode(header, None, 0, identity(1))


def test_a_slot_larger_than_the_model_is_refused(heaps):
    header = encode(Message(0, "push", np.arange(1001.0), number=1), identity(0), 0, FRONT)
    with pytest.raises(ProtocolError, match="announced 8008 bytes"):
        decode(header, None, 0, identity(1, heaps[0]))


def test_copies_go_to_the_heap_when_they_are_large(heaps):
    copies = BufferPool()
    copies.heap = heaps[0]
    large, small = copies.frozen(np.zeros(1 << 16)), copies.frozen(np.zeros(8))
    assert heaps[0].place(large) is not None
    assert heaps[0].place(small) is None
    assert copies.frozen(large) is large, "what lies there already is not copied again"
    overflowing = copies.frozen(np.zeros(ROOM))
    assert heaps[0].place(overflowing) is None
    assert not overflowing.flags.writeable


def test_lengths_that_vary_share_slots(heaps):
    places = set()
    for size in range(1000, 1300):
        copy, view = carried(heaps, np.full(size, size, np.float32))
        assert (view == size).all()
        places.add(heaps[0].place(copy))
        del copy, view
    assert len(places) <= 4, "every length has taken a slot of its own"


def test_released_memory_of_free_slots_returns_to_the_system(heaps):
    """A held array keeps its values, and a slot whose memory was returned can be used again."""
    heap = heaps[0]
    free, _ = carried(heaps, np.ones(20_000))
    place = heap.place(free)
    kept, seen = carried(heaps, np.full(20_000, 3.0))
    before = allocated(heap)
    del free, _
    gc.collect()
    heap.release()
    assert before - allocated(heap) >= 150_000
    assert (seen == 3).all()
    assert (kept == 3).all()
    again, view = carried(heaps, np.full(20_000, 2.0))
    assert heap.place(again) == place
    assert (view == 2).all()


@pytest.mark.parametrize("page", [mmap.PAGESIZE, 16 * mmap.PAGESIZE])
def test_only_whole_pages_of_the_system_are_returned(page, monkeypatch):
    """Pages of the system may be larger than those of the heap, as those of 64 KiB of some processors."""
    monkeypatch.setattr(mmap, "PAGESIZE", page)
    memory = SharedMemory.create(4 * page)
    array = memory.array(np.uint8, 4 * page)
    array[:] = 1
    memory.discard(100, 100)
    assert array.all()
    memory.discard(page - 100, 2 * page + 200)
    assert array[:page].all()
    assert array[3 * page :].all()
    assert not array[page : 3 * page].any()


def allocated(heap):
    """Bytes of the heap's segment for which the system has memory."""
    return 512 * os.fstat(heap._memory._descriptor).st_blocks
