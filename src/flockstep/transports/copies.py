"""Copies for messages, in memory that is used again."""

from __future__ import annotations

import sys

import numpy as np

from flockstep.messages import Address, Array, frozen
from flockstep.transports.shared_heap import SMALLEST, SharedHeap

ZERO_COPY = 1 << 18
"""Bytes from which an array is sent from where it lies: below, a copy is cheaper than keeping track of it."""
KEPT = 8
"""Buffers of each size that are kept."""


class Copies:
    """Does what `frozen` does; a large copy goes where an earlier one lay that nobody holds any more.

    Fresh memory has to be mapped and zeroed page by page, which costs more than the copying itself. Where nodes share
    memory, copies go there, so that they need not go through a socket.
    """

    def __init__(self) -> None:
        self.heap: SharedHeap | None = None
        """Memory that the nodes share, if they do."""
        self.lost: set[Address] = set()
        """Nodes that have died: what was lent to them is free."""
        self._buffers: dict[tuple[tuple[int, ...], str], list[Array]] = {}

    def frozen(self, array: Array) -> Array:
        """A read-only copy of `array`, or `array` itself where nobody can change it."""
        if self.heap is not None and array.nbytes >= SMALLEST:
            if self.heap.place(array) is not None:
                return array
            there = self.heap.copy(array, self.lost)
            if there is not None:
                return there
        if array.nbytes < ZERO_COPY or not array.flags.writeable:
            return frozen(array)
        buffers = self._buffers.setdefault((array.shape, array.dtype.str), [])
        buffer = next((buffer for buffer in buffers if sys.getrefcount(buffer) <= _UNUSED), None)
        if buffer is None:
            if len(buffers) >= KEPT:
                return frozen(array)
            buffer = np.empty(array.shape, array.dtype)
            buffers.append(buffer)
        np.copyto(buffer, array)
        copy = buffer.view()
        copy.flags.writeable = False
        return copy


def _references() -> int:
    buffers = [np.empty(0)]
    return next(sys.getrefcount(buffer) for buffer in buffers)


_UNUSED = _references()
"""References to a buffer that only the list holds, as the loop over it counts them."""
