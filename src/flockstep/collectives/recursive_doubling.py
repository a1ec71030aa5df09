"""All-reduce by recursive doubling (butterfly), for any number of workers."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.arrays.schema import FlatArray
from flockstep.collectives.base import Collective, received
from flockstep.nodes import Worker


@dataclass(frozen=True)
class RecursiveDoubling(Collective):
    """All-reduce in log2(n) rounds of whole arrays (Thakur, Rabenseifner & Gropp 2005).

    With n no power of two, the last n - 2^floor(log2 n) workers first fold their array into a partner's and get the
    result back at the end. Addition commutes, so partners compute the same bits.
    """

    async def all_reduce(self, me: Worker, array: FlatArray) -> None:
        """Replace `array` by the sum over all workers."""
        power = 1 << (me.workers.bit_length() - 1)
        if me.rank >= power:
            me.send(me.rank - power, "fold", array)
            array[:] = await received(me, "unfold", me.rank - power)
            return
        folded = me.rank + power < me.workers
        if folded:
            array += await received(me, "fold", me.rank + power)
        distance = 1
        while distance < power:
            partner = me.rank ^ distance
            me.send(partner, "double", array)
            array += await received(me, "double", partner)
            distance *= 2
        if folded:
            me.send(me.rank + power, "unfold", array)
