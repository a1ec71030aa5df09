"""Large payloads between processes of one host: written once by the sender, read where they lie by the receivers.

Every node has a segment, in which it alone writes arrays. In front of the arrays stand a token, by which others know
that they have attached to the right segment, and a table: for each slot and each node, how many messages with that
slot the node is done with. A slot is free again once these are as many as were sent.
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
from flockstep.messages import Address, Array
from flockstep.transports.shared_memory import SharedMemory

SLOTS = 64
"""Arrays that a node can have lying there at a time."""
NODES = 1024
"""Nodes of a run, at most, whose processes can share memory."""
SMALLEST = 1 << 16
"""Bytes below which a message goes through the socket: there a copy costs less than the bookkeeping."""
PAGE = 4096
TOKEN = 16
"""Bytes of a token, at the start of the segment."""
FRONT = PAGE + SLOTS * NODES * 8
"""Bytes before the first array: what of them is not used takes no memory."""


@dataclass
class _Slot:
    """A place for arrays up to a size, its memory as bytes, and how many of them are in use."""

    number: int
    start: int
    array: Array
    address: int
    nbytes: int = 0
    sent: Counter[int] = field(default_factory=Counter)
    """Node → messages."""


class SharedHeap:
    """The segment that this node writes into; `told` is what another node of this host needs to read there."""

    def __init__(self, room: int):
        """`room`: bytes of all arrays that lie there at a time, at most.

        Raises:
            ConfigurationError: this system has no such memory, or not that much.
        """
        self._memory = SharedMemory.create(FRONT + room)
        token = secrets.token_bytes(TOKEN)
        self._memory.array(np.uint8, TOKEN)[:] = np.frombuffer(token, np.uint8)
        self.told = f"{token.hex()}@{self._memory.address}"
        self._done = _table(self._memory)
        self._slots: dict[int, list[_Slot]] = {}
        """By size."""
        self._numbered: list[_Slot] = []
        self._found: dict[int, _Slot] = {}
        self._used = FRONT

    def copy(self, array: Array, lost: Collection[Address] = ()) -> Array | None:
        """A read-only copy of `array` in a slot; None where none is free. What `lost` nodes hold counts as free."""
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
        """Number of the slot in which `array`, made by `copy`, lies; None: it lies elsewhere, or is a part of it."""
        slot = self._found.get(id(array.base))
        if slot is None or array.nbytes != slot.nbytes or _address(array) != slot.address:
            return None
        return slot.number

    def sent(self, place: int, to: Address, count: int = 1) -> int:
        """A message with that slot goes to a node (count -1: it did not go after all); where the array starts."""
        slot = self._numbered[place]
        slot.sent[to % NODES] += count
        return slot.start

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


class Borrowed:
    """Another node's segment, as the node `me` reads it."""

    def __init__(self, told: str, me: Address):
        """`told`: what that node says of its heap.

        Raises:
            CompositionError: it lies on another host, or is another segment than that node's.
        """
        token, _, address = told.partition("@")
        self._memory = SharedMemory.attach(address, FRONT)
        if self._memory.array(np.uint8, TOKEN).tobytes().hex() != token:
            raise CompositionError(f"the memory at {address} is not what it should be; use --transport ipc or tcp")
        self._done = _table(self._memory)
        self._me = me % NODES

    def view(self, place: int, start: int, dtype: str, size: int) -> Array:
        """The array that a message says; read-only, valid as long as somebody holds it.

        Raises:
            ProtocolError: there can be none.
        """
        nbytes = size * np.dtype(dtype).itemsize
        inside = start >= FRONT and start + nbytes <= self._memory.size and start % 64 == 0
        if not (0 <= place < SLOTS and size >= 0 and inside):
            raise ProtocolError(f"slot {place} at byte {start} with {nbytes} bytes is none of a heap")
        array: Array = self._memory.array(dtype, size, start)
        array.flags.writeable = False
        weakref.finalize(array, _count, self._done[place], self._me, os.getpid()).atexit = False
        return array


def slot_bytes(nbytes: int) -> int:
    """Bytes of the slot for so many: whole pages, of few different sizes, so that lengths that vary share slots."""
    step = max(PAGE, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


def heap_room_for(model_bytes: int) -> int:
    """Bytes for the messages of one node that are on their way."""
    return 16 * slot_bytes(model_bytes) + (1 << 20)


def _address(array: Array) -> int:
    """Where its first byte lies."""
    address: int = array.__array_interface__["data"][0]
    return address


def _table(memory: SharedMemory) -> Array:
    table: Array = memory.array(np.int64, SLOTS * NODES, PAGE).reshape(SLOTS, NODES)
    return table


def _count(done: Array, entry: int, process: int) -> None:
    if os.getpid() == process:  # a forked child has arrays of its parent's, and has read none
        done[entry] += 1


def _references() -> int:
    slot = _Slot(0, 0, np.empty(0), 0)
    return sys.getrefcount(slot.array)


_UNUSED = _references()
"""References to an array that only its slot holds."""
