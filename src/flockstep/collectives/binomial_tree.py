"""All-reduce along a binomial tree: reduce to rank 0, then broadcast."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.arrays.schema import FlatArray
from flockstep.collectives import costs
from flockstep.collectives.base import Collective
from flockstep.collectives.exchange import children
from flockstep.collectives.group import Group


@dataclass(frozen=True)
class BinomialTree(Collective):
    """Reduce to rank 0, then broadcast from rank 0, along a binomial tree (Ben-Nun & Hoefler 2019: "Tree").

    The exchange has 2 ⌈log2 n⌉ rounds of whole arrays, and all workers together send 2(n-1)K elements. Rank r adds the
    sums of the subtrees of r+1, r+2, r+4, … to its own array in that order, for every distance d for which r is a
    multiple of 2d.
    """

    async def all_reduce(self, me: Group, array: FlatArray) -> None:
        await self.reduce(me, array)
        await self.broadcast(me, array)

    def cost(self, workers: int, nbytes: float, link: costs.LinkModel) -> float:
        return costs.tree(workers, nbytes, link)

    def sent_elements(self, workers: int, size: int, rank: int) -> int:
        """Return the number of elements sent: each node sends K to its parent and K to each of its children."""
        return (len(children(rank, workers)) + (rank > 0)) * size

    def rounds(self, workers: int) -> int:
        """Return the number of rounds among P workers: 2 ⌈log2 P⌉, the depth of the tree up and down."""
        return 2 * costs.halvings(workers)
