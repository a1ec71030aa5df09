"""Large payloads between processes of one host: written once by the sender, read where they lie by the receivers.

A segment has one region for each node, which alone writes arrays into it. In front of the arrays stands a table: for
each slot and each node, how many messages with that slot the node is done with. A slot is free again once these are as
many as were sent.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from flockstep.errors import ProtocolError
from flockstep.messages import Address, Array
from flockstep.transports.shared_memory import SharedMemory

SLOTS = 64
"""Arrays that a node can have lying there at a time."""
SMALLEST = 1 << 16
"""Bytes below which a message goes through the socket: there a copy costs less than the bookkeeping."""
PAGE = 4096


@dataclass
class _Slot:
    """A place for arrays up to a size, its memory as bytes, and how many of them are in use."""

    start: int
    array: Array
    nbytes: int = 0
    sent: Counter[int] = field(default_factory=Counter)
    """Node → messages."""


class SharedHeap:
    """A node's view of such a segment: its own region, and those of the others."""

    def __init__(self, memory: SharedMemory, address: Address, workers: int, servers: int, start: int, room: int):
        """Regions of `room` bytes each begin at byte `start` of the segment, workers' first."""
        self._memory = memory
        self._workers, self._nodes = workers, workers + servers
        self._start = start
        self._table = table_bytes(self._nodes)
        self._stride = self._table + room
        self._me = self._index(address)
        self._done: dict[int, Array] = {}
        self._slots: list[_Slot] = []
        self._used = self._table

    def copy(self, array: Array, lost: Collection[Address] = ()) -> Array | None:
        """A read-only copy of `array` in a slot; None where none is free. What `lost` nodes hold counts as free."""
        gone = {self._index(address) for address in lost}
        fit = [slot for slot in self._slots if len(slot.array) == _room(array.nbytes)]
        slot = next((slot for slot in fit if self._free(slot, gone)), None) or self._new(array.nbytes)
        if slot is None:
            return None
        slot.nbytes = array.nbytes
        view: Array = slot.array[: array.nbytes].view(array.dtype).reshape(array.shape)
        view[...] = array
        view.flags.writeable = False
        return view

    def place(self, array: Array) -> int | None:
        """Which slot `array`, made by `copy`, lies in."""
        base = array.base
        for i, slot in enumerate(self._slots):
            if slot.array is base:
                whole = array.nbytes == slot.nbytes and array.ctypes.data == base.ctypes.data
                return i if whole else None
        return None

    def sent(self, place: int, to: Address, count: int = 1) -> int:
        """A message with that slot goes to a node (count -1: it did not go after all); where the array starts."""
        slot = self._slots[place]
        slot.sent[self._index(to)] += count
        return slot.start

    def view(self, source: Address, place: int, start: int, dtype: str, size: int) -> Array:
        """The array that a message from `source` says; read-only, valid as long as somebody holds it.

        Raises:
            ProtocolError: there can be none.
        """
        nbytes, index = size * np.dtype(dtype).itemsize, self._index(source)
        inside = self._table <= start and start + nbytes <= self._stride and start % 64 == 0
        if not (0 <= index < self._nodes and 0 <= place < SLOTS and size >= 0 and inside):
            raise ProtocolError(f"slot {place} at byte {start} with {nbytes} bytes is none of a region")
        array: Array = self._memory.array(dtype, size, self._start + index * self._stride + start)
        array.flags.writeable = False
        done = self._finished(index)
        weakref.finalize(array, _count, done, place * self._nodes + self._me).atexit = False
        return array

    def _index(self, address: Address) -> int:
        return address if address >= 0 else self._workers - 1 - address

    def _finished(self, index: int) -> Array:
        """The table of that node's region."""
        if index not in self._done:
            start = self._start + index * self._stride
            self._done[index] = self._memory.array(np.int64, SLOTS * self._nodes, start)
        return self._done[index]

    def _free(self, slot: _Slot, gone: Collection[int]) -> bool:
        if sys.getrefcount(slot.array) > _UNUSED:
            return False
        number, done = self._slots.index(slot), self._finished(self._me)
        return all(done[number * self._nodes + to] == n for to, n in slot.sent.items() if to not in gone)

    def _new(self, nbytes: int) -> _Slot | None:
        room = _room(nbytes)
        if len(self._slots) == SLOTS or self._used + room > self._stride:
            return None
        start = self._used
        self._used += room
        where = self._start + self._me * self._stride + start
        self._slots.append(_Slot(start, self._memory.array(np.uint8, room, where)))
        return self._slots[-1]


def _room(nbytes: int) -> int:
    """Bytes of the slot for so many: whole pages, of few different sizes, so that lengths that vary share slots."""
    step = max(PAGE, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


def table_bytes(nodes: int) -> int:
    """Bytes of the table in front of a region."""
    return -(-SLOTS * nodes * 8 // PAGE) * PAGE


def _count(done: Array, entry: int) -> None:
    done[entry] += 1


def _references() -> int:
    slot = _Slot(0, np.empty(0))
    return sys.getrefcount(slot.array)


_UNUSED = _references()
"""References to an array that only its slot holds."""
