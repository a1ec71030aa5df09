"""Memory for gradients that wait in virtual time: written in batches, used one by one, then written again."""

from __future__ import annotations

import numpy as np

from flockstep.arrays.schema import FlatArray

ROWS = 64
"""Gradients of one batched call: enough to amortise the call, few enough to stay in the cache."""


class GradientPool:
    """Slabs of `ROWS` rows. A slab is written again once all its rows have been given back.

    Fresh memory for every batch would cost more than the gradients themselves: each page of it is zeroed first.
    """

    def __init__(self, size: int, dtype: np.dtype[np.floating]):
        self._size = size
        self._dtype = dtype
        self._free: list[_Slab] = []
        self._open = _Slab(np.empty((ROWS, size), dtype))
        self._held: dict[int, tuple[_Slab, FlatArray]] = {}
        self.gathered: FlatArray = np.empty((ROWS, size), dtype)
        """Where the parameters of one call are brought together."""

    def take(self, ranks: list[int]) -> FlatArray:
        """Rows for the gradients of at most `ROWS` ranks, in that order; each is held until that rank gives it back."""
        slab = self._room_for(len(ranks))
        rows = slab.rows[slab.used : slab.used + len(ranks)]
        slab.used += len(ranks)
        slab.held += len(ranks)
        for rank, row in zip(ranks, rows, strict=True):
            self._held[rank] = slab, row
        return rows

    def row(self, rank: int) -> FlatArray:
        """The gradient of that rank."""
        return self._held[rank][1]

    def give_back(self, rank: int) -> None:
        """That rank uses its gradient no more."""
        held = self._held.pop(rank, None)
        if held is not None:
            slab = held[0]
            slab.held -= 1
            if slab.held == 0 and slab is not self._open:
                self._free.append(slab)

    def _room_for(self, count: int) -> _Slab:
        """The slab that is being filled, or the next one."""
        slab = self._open
        if slab.held == 0:
            slab.used = 0
        if slab.used + count > ROWS:
            if slab.held == 0:
                self._free.append(slab)
            slab = self._open = self._free.pop() if self._free else _Slab(np.empty((ROWS, self._size), self._dtype))
            slab.used = 0
        return slab


class _Slab:
    __slots__ = ("held", "rows", "used")

    def __init__(self, rows: FlatArray):
        self.rows = rows
        self.used = 0
        self.held = 0
