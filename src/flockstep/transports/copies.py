"""Memory for arrays on their way, which is used again once nobody holds what lies in it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from flockstep.messages import Address, Array, frozen, unchangeable
from flockstep.transports.shared_heap import SMALLEST, SharedHeap, slot_bytes

REUSED = 1 << 16
"""Bytes from which memory is used again: fresh memory of that size has to be mapped and zeroed page by page, which
costs more than the copying itself."""
KEPT = 8
"""Buffers of each size that are kept."""


class Copies:
    """Read-only copies, as `frozen` makes them, in a heap that other processes read or in buffers that are used again.

    What lies in a buffer is seen by the arrays that hold it: the buffer is free again when they are gone.
    """

    def __init__(self) -> None:
        self.heap: SharedHeap | None = None
        """Memory that other nodes read, if there is some."""
        self.lost: set[Address] = set()
        """Nodes that have died: what was lent to them is free."""
        self._buffers: dict[int, list[Array]] = {}

    def frozen(self, array: Any) -> Array:
        """A read-only copy of `array`, or `array` itself where nobody can change it; of a tensor one on its device."""
        if not isinstance(array, np.ndarray):
            return frozen(array)
        if self.heap is not None and array.nbytes >= SMALLEST:
            if not array.flags.writeable and self.heap.place(array) is not None:
                return array
            there = self.heap.copy(array, self.lost)
            if there is not None:
                return there
        if array.nbytes < REUSED or not array.flags.writeable:
            return frozen(array)
        copy: Array = self.room(array.nbytes).view(array.dtype).reshape(array.shape)
        np.copyto(copy, array)
        copy.flags.writeable = False
        return copy

    def lasting(self, array: Array) -> bool:
        """Whether nobody can change the array: it lies in one of these buffers, or in no memory that can be written."""
        if array.flags.writeable:
            return False
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        return any(root is one for some in self._buffers.values() for one in some) or unchangeable(array)

    def room(self, nbytes: int) -> Array:
        """An array of that many bytes (uint8) which nobody else holds."""
        if nbytes < REUSED:
            return np.empty(nbytes, np.uint8)
        size = slot_bytes(nbytes)
        buffers = self._buffers.setdefault(size, [])
        buffer = next((buffer for buffer in buffers if sys.getrefcount(buffer) <= _UNUSED), None)
        if buffer is None:
            buffer = np.empty(size, np.uint8)
            if len(buffers) < KEPT:
                buffers.append(buffer)
        return buffer[:nbytes]


def _references() -> int:
    buffers = [np.empty(0)]
    return next(sys.getrefcount(buffer) for buffer in buffers)


_UNUSED = _references()
"""References to a buffer that only the list holds, as the loop over it counts them."""
