"""Buffers for arrays in transit, which are reused as soon as no array refers to them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from flockstep.links.shared_heap import SMALLEST, SharedHeap, slot_bytes
from flockstep.messages import Address, Array, frozen, unchangeable

REUSED = 1 << 16
"""Smallest size in bytes of a reused buffer. New memory of this size would have to be mapped and zeroed page by page,
which takes longer than the copy.
"""
KEPT = 8
"""Largest number of buffers of each size that are kept for reuse."""


class BufferPool:
    """Read-only copies of arrays, kept until they are sent, in reused buffers or in a heap that other processes can
    read.

    Every array in a buffer holds a reference to the buffer; the buffer is free when only its list refers to it.
    """

    def __init__(self) -> None:
        self.heap: SharedHeap | None = None
        """Heap that other nodes can read; None if this node shares no memory."""
        self.lost: set[Address] = set()
        """Addresses of nodes that have died; memory that they could read is free."""
        self._buffers: dict[int, list[Array]] = {}

    def frozen(self, array: Any) -> Array:
        """Return a read-only copy of `array`, or `array` itself if it cannot change.

        The copy of a tensor is on the tensor's device.
        """
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

    def release(self) -> None:
        """Return the memory of free buffers to the system."""
        self._buffers = {
            size: [buffer for buffer in buffers if sys.getrefcount(buffer) > _UNUSED]
            for size, buffers in self._buffers.items()
        }
        if self.heap is not None:
            self.heap.release()

    def lasting(self, array: Array) -> bool:
        """Return whether the array cannot change while it is sent, because it lies in one of these buffers or in
        read-only memory.
        """
        if array.flags.writeable:
            return False
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        return any(root is one for some in self._buffers.values() for one in some) or unchangeable(array)

    def room(self, nbytes: int) -> Array:
        """Return an array of `nbytes` bytes (uint8) in a free buffer."""
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
"""Reference count of a buffer that only its list holds, as the loop in `room` counts references."""
