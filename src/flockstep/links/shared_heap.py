"""Large payloads between processes of one host: the sender writes an array once, and receivers read it in place.

Every node has a segment to which no other node writes arrays. The segment begins with a token, by which other nodes
verify that they have attached to the right segment, and a table of the number of messages with each slot that each node
has finished reading. The arrays follow. A slot is free when every node has finished as many messages as it was sent.
"""

from __future__ import annotations

import os
import secrets
import sys
import weakref
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from flockstep.errors import CompositionError, ProtocolError
from flockstep.links.shared_memory import SharedMemory
from flockstep.messages import Address, Array

SLOTS = 64
"""Largest number of arrays in a node's segment at a time."""
NODES = 1024
"""Largest number of nodes in a run that can share memory."""
SMALLEST = 1 << 17
"""Smallest payload in bytes that goes through shared memory; copying a smaller payload to the socket and from it costs
less than managing a slot.
"""
PAGE = 4096
TOKEN = 16
"""Size of the token at the start of a segment, in bytes."""
FRONT = PAGE + SLOTS * NODES * 8
"""Number of bytes before the first array of a segment; unused bytes take no physical memory."""


@dataclass
class _Slot:
    """A slot: memory for an array of limited size, and the number of bytes in use."""

    number: int
    start: int
    array: Array
    address: int
    nbytes: int = 0
    sent: Counter[int] = field(default_factory=Counter)
    """Node → number of messages sent to it with this slot."""


class SharedHeap:
    """The segment that this node writes to; other nodes of the host attach to it at its `location`."""

    def __init__(self, room: int):
        """Create a segment for arrays of up to `room` bytes together.

        Raises:
            ConfigurationError: this system has no shared memory, or not enough of it.
        """
        self._memory = SharedMemory.create(FRONT + room)
        token = secrets.token_bytes(TOKEN)
        self._memory.array(np.uint8, TOKEN)[:] = np.frombuffer(token, np.uint8)
        self.location = f"{token.hex()}@{self._memory.address}"
        self._done = _table(self._memory)
        self._slots: dict[int, list[_Slot]] = {}
        """Slot size in bytes → slots of that size."""
        self._numbered: list[_Slot] = []
        self._found: dict[int, _Slot] = {}
        self._used = FRONT

    def copy(self, array: Array, lost: Collection[Address] = ()) -> Array | None:
        """Return a read-only copy of `array` in a free slot; None if no slot is free.

        Slots held only by `lost` nodes count as free.
        """
        room, gone = slot_bytes(array.nbytes), {address % NODES for address in lost}
        slots = self._slots.setdefault(room, [])
        slot = next((one for one in slots if self._free(one, gone)), None) or self._new(room, slots)
        if slot is None:
            return None
        slot.nbytes = array.nbytes
        view: Array = slot.array[: array.nbytes].view(array.dtype).reshape(array.shape)
        view[...] = array
        view.flags.writeable = False
        return view

    def place(self, array: Array) -> int | None:
        """Return the number of the slot that holds exactly `array`, which `copy` returned; None if there is no such
        slot.
        """
        slot = self._found.get(id(array.base))
        if slot is None or array.nbytes != slot.nbytes or _address(array) != slot.address:
            return None
        return slot.number

    def sent(self, place: int, to: Address, count: int = 1) -> int:
        """Count messages to a node that refer to slot `place`; `count` is -1 if a message was not sent after all.
        Return the byte at which the slot starts.
        """
        slot = self._numbered[place]
        slot.sent[to % NODES] += count
        return slot.start

    def release(self) -> None:
        """Return the memory of free slots to the system."""
        for slot in self._numbered:
            if self._free(slot, ()):
                self._memory.discard(slot.start, len(slot.array))

    def _free(self, slot: _Slot, gone: Collection[int]) -> bool:
        if sys.getrefcount(slot.array) > _UNUSED:
            return False
        done = self._done[slot.number]
        return all(done[to] == n for to, n in slot.sent.items() if to not in gone)

    def _new(self, room: int, slots: list[_Slot]) -> _Slot | None:
        start = self._used
        if len(self._numbered) == SLOTS or start + room > self._memory.size:
            return None
        self._used += room
        array: Array = self._memory.array(np.uint8, room, start)
        slot = _Slot(len(self._numbered), start, array, _address(array))
        slots.append(slot)
        self._numbered.append(slot)
        self._found[id(slot.array)] = slot
        return slot


class PeerMemory:
    """The segment of another node, as mapped by the node `me`, which reads arrays in it."""

    def __init__(self, location: str, me: Address):
        """Attach to another node's segment; `location`: that node's `SharedHeap.location`.

        Raises:
            CompositionError: the segment lies on another host, or is not that node's.
        """
        token, _, address = location.partition("@")
        self._memory = SharedMemory.attach(address, FRONT)
        if self._memory.array(np.uint8, TOKEN).tobytes().hex() != token:
            raise CompositionError(f"the memory at {address} has an unexpected layout; use --transport ipc or tcp")
        self._done = _table(self._memory)
        self._me = me % NODES

    def view(self, place: int, start: int, dtype: str, size: int) -> Array:
        """Return a read-only view of the array that a message describes; the view is valid as long as anything refers
        to it.

        Raises:
            ProtocolError: the segment can hold no such array.
        """
        nbytes = size * np.dtype(dtype).itemsize
        inside = start >= FRONT and start + nbytes <= self._memory.size and start % 64 == 0
        if not (0 <= place < SLOTS and size >= 0 and inside):
            raise ProtocolError(f"slot {place} at byte {start} with {nbytes} bytes does not exist in the heap")
        array: Array = self._memory.array(dtype, size, start)
        array.flags.writeable = False
        weakref.finalize(array, _count, self._done[place], self._me, os.getpid()).atexit = False
        return array


def slot_bytes(nbytes: int) -> int:
    """Return the size in bytes of a slot for an array of `nbytes` bytes. Few different sizes exist, so that arrays of
    similar size can use the same slots.
    """
    step = max(PAGE, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


def heap_room_for(model_bytes: int) -> int:
    """Return the size in bytes of the segment through which a node with a model of this size sends its arrays."""
    return 16 * slot_bytes(model_bytes) + (1 << 20)


def _address(array: Array) -> int:
    """Memory address of the array's first byte."""
    address: int = array.__array_interface__["data"][0]
    return address


def _table(memory: SharedMemory) -> Array:
    table: Array = memory.array(np.int64, SLOTS * NODES, PAGE).reshape(SLOTS, NODES)
    return table


def _count(done: Array, entry: int, process: int) -> None:
    if os.getpid() == process:  # a forked child inherits the parent's arrays, but has read none
        done[entry] += 1


def _references() -> int:
    slot = _Slot(0, 0, np.empty(0), 0)
    return sys.getrefcount(slot.array)


_UNUSED = _references()
"""Reference count of an array that only its slot holds."""
