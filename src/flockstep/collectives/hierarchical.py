"""All-reduce in two levels: inside groups, and between groups over as many connections as a group has workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from flockstep.arrays.schema import FlatArray
from flockstep.collectives import costs
from flockstep.collectives.base import Collective
from flockstep.collectives.group import Group, Subgroup
from flockstep.collectives.ring import Ring
from flockstep.errors import require
from flockstep.expression import SHOWN

INNER = Ring()


@dataclass(frozen=True)
class HierarchicalCollective(Collective):
    """Two-level all-reduce (Jia et al. 2018; hierarchical in NCCL and Horovod): inside groups, and between groups.

    A group consists of `group` consecutive ranks; r is their number. Each group reduce-scatters around a ring; the
    workers that hold the same share, one in each group, sum the share with `outer`; then each group gathers the shares
    around the ring. Every group sends 2(n/r-1)/(n/r) K elements to other groups, over r connections at once. Shares are
    summed in the ring's order within groups and then in the outer order over groups. If r does not divide n, each
    worker of the last, smaller group first adds its array to the array of rank - r, from which it receives the result
    at the end. With r ≥ n there is one group.
    """

    group: int = field(default=4, metadata=SHOWN)
    outer: Collective = field(default_factory=Ring)

    def __post_init__(self) -> None:
        require(self.group >= 1, "group", ">= 1 workers", self.group, "use the number of workers on one host")

    async def all_reduce(self, me: Group, array: FlatArray) -> None:
        r, full = self._grid(me.workers)
        if me.rank >= full:
            me.send(me.rank - r, "fold", array)
            await me.receive_array("unfold", me.rank - r, array)
            return
        folded = me.rank + r >= full and me.rank + r < me.workers
        if folded:
            array += await me.receive_array("fold", me.rank + r)
        first = me.rank - me.rank % r
        here = Subgroup(me, range(first, first + r))
        part, view = await INNER.reduce_scatter(here, array)
        await self.outer.all_reduce(Subgroup(me, range(me.rank % r, full, r)), view)
        for rank, piece in enumerate(await INNER.all_gather(here, array[part])):
            array[INNER.share(r, len(array), rank)] = piece
        if folded:
            me.send(me.rank + r, "unfold", array)

    def cost(self, workers: int, nbytes: float, link: costs.LinkModel) -> float:
        """Return the seconds of a ring of r workers in each group, plus an all-reduce of 1/r of the m bytes over the
        groups; if r does not divide the number of workers, 2 L + (2 + 1/r) m G more for latency L and G seconds per
        byte.
        """
        r, full = self._grid(workers)
        folds = 2 * link.message(nbytes) + link.occupied(nbytes / r) if full < workers else 0
        return INNER.cost(r, nbytes, link) + self.outer.cost(full // r, nbytes / r, link) + folds

    def sent_elements(self, workers: int, size: int, rank: int) -> int:
        r, full = self._grid(workers)
        if rank >= full:
            return size
        lane = INNER.share(r, size, rank % r)
        outer = self.outer.sent_elements(full // r, lane.stop - lane.start, rank // r)
        folded = full <= rank + r < workers
        return INNER.sent_elements(r, size, rank % r) + outer + folded * size

    def rounds(self, workers: int) -> int:
        """Return the number of rounds of both levels, plus two if the number of workers is not a multiple of the size
        of a group, min(group, workers).
        """
        r, full = self._grid(workers)
        return INNER.rounds(r) + self.outer.rounds(full // r) + 2 * (full < workers)

    def _grid(self, workers: int) -> tuple[int, int]:
        """Return the number of workers in a group, and in all full groups together."""
        r = min(self.group, workers)
        return r, workers - workers % r
