"""Ring all-reduce: reduce-scatter, then all-gather, around a ring."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.arrays.schema import FlatArray, slices
from flockstep.collectives.base import Collective, received
from flockstep.nodes import Worker


@dataclass(frozen=True)
class Ring(Collective):
    """All-reduce on a ring (Patarasuk & Yuan 2009; Baidu 2017).

    Each worker sends 2(n-1) messages of about K/n elements, 2(n-1)K elements over all workers. Chunk c is summed in
    the order c, c+1, …, c-1 of ranks, once, so that all workers end with the same bits.
    """

    async def all_reduce(self, me: Worker, array: FlatArray) -> None:
        """Replace `array` by the sum over all workers."""
        n, rank = me.workers, me.rank
        left, right = (rank - 1) % n, (rank + 1) % n
        chunks = [array[part] for part in slices(len(array), n)]
        for hop in range(n - 1):
            me.send(right, "reduce", chunks[(rank - hop) % n])
            chunks[(rank - hop - 1) % n] += await received(me, "reduce", left)
        for hop in range(n - 1):
            me.send(right, "gather", chunks[(rank - hop + 1) % n])
            chunks[(rank - hop) % n][:] = await received(me, "gather", left)
