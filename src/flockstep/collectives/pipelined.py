"""All-reduce along a chain, in chunks."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.arrays.schema import FlatArray, slices
from flockstep.collectives import costs
from flockstep.collectives.base import Collective
from flockstep.collectives.group import Group
from flockstep.errors import require


@dataclass(frozen=True)
class Pipelined(Collective):
    """A pipelined chain: reduce along 0, 1, …, n-1 and broadcast back, in `chunks` chunks.

    The sum is taken in order of rank, as in a loop over the workers. For K elements, the workers send 2(n-1)K
    elements in total, and no worker more than 2K. The last rank begins to broadcast only once it has reduced every
    chunk; otherwise the two directions would compete for every network card.
    """

    chunks: int = 16

    def __post_init__(self) -> None:
        require(self.chunks >= 1, "chunks", ">= 1", self.chunks, "16 is usual")

    async def all_reduce(self, me: Group, array: FlatArray) -> None:
        last, chunks = me.workers - 1, [array[part] for part in slices(len(array), self.chunks)]
        for chunk in chunks:
            if me.rank > 0:
                chunk += await me.receive_array("up", me.rank - 1)
            if me.rank < last:
                me.send(me.rank + 1, "up", chunk)
        for chunk in chunks:
            if me.rank < last:
                await me.receive_array("down", me.rank + 1, chunk)
            if me.rank > 0:
                me.send(me.rank - 1, "down", chunk)

    def cost(self, workers: int, nbytes: float, link: costs.LinkModel) -> float:
        """Return the seconds of an all-reduce in c chunks, for m bytes on P workers and a link of latency L and G
        seconds per byte: 2 (P-1) L + 2 (P-2+c) m G / c; 0 for a single worker.
        """
        if workers == 1:
            return 0.0
        return 2 * ((workers - 1) * link.latency + (workers - 2 + self.chunks) * link.occupied(nbytes / self.chunks))

    def sent_elements(self, workers: int, size: int, rank: int) -> int:
        """Return the number of elements sent: K up from all ranks but the last, and K down from all ranks but the
        first.
        """
        return size * ((rank < workers - 1) + (rank > 0))

    def rounds(self, workers: int) -> int:
        """Return the number of rounds among P workers: 2 (P-1), the length of the chain up and down."""
        return 2 * (workers - 1)
