"""Overlap local SGD: local steps, during which the replicas' mean is computed, and a pull of each replica toward the
mean.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flockstep.arrays.namespace import copied
from flockstep.arrays.schema import FlatArray
from flockstep.collectives.base import Collective
from flockstep.collectives.by_host import ByHost
from flockstep.errors import require
from flockstep.nodes import Worker
from flockstep.strategies.base import Strategy, TaxonomyEntry, Traits
from flockstep.strategies.resizing import Resizing


@dataclass
class Anchor:
    """A worker's state: the anchor z (K,), its velocity v (K,), and the parameters that the worker contributes to the
    next average.
    """

    model: FlatArray
    velocity: FlatArray
    mean: FlatArray
    """The parameters that this worker contributes to the next average, of shape (K,)."""
    under_way: bool = False


@dataclass(frozen=True)
class OverlapLocalSGD(Strategy):
    """Overlap local SGD (Wang, Liang & Joshi 2020, section 2 and its momentum variant): averages overlap local steps.

    Every `period` (tau) steps w_i ← w_i - alpha (w_i - z), with the anchor z that all workers share. Then the mean m of
    these w_i is computed in the background, and workers wait for the mean only tau steps later: v ← beta v + (m - z), z
    ← z + v. With alpha = 1 a replica jumps to an anchor one period old; with alpha = 0 the replicas are independent.
    """

    period: int = 10
    alpha: float = 0.6
    beta: float = 0.0
    collective: Collective = field(default_factory=ByHost)

    def __post_init__(self) -> None:
        require(self.period >= 1, "period", ">= 1 local steps", self.period, "10 is usual")
        require(0 <= self.alpha <= 1, "alpha", "in [0, 1]", self.alpha, "0.6 is usual")
        require(0 <= self.beta < 1, "beta", "in [0, 1)", self.beta, "use 0 for no momentum; 0.7 is usual")

    # Replicas move part of the way to an old average; a dead worker stops all workers.
    traits = Traits(delivery="partial", survives=False, results=("mean", "rank0", "best"))
    taxonomy_entry = TaxonomyEntry("decentral", "bounded async", "reduce", "dedicated master")

    resizing = Resizing(replicas="own", common=("model", "velocity"))

    def worker_state(self, me: Worker) -> Anchor:
        return Anchor(copied(me.params), 0 * me.params, copied(me.params))

    def forget(self, state: Anchor, step: int, least: int) -> None:
        if step // self.period > least // self.period:
            state.under_way = False

    async def worker(self, me: Worker) -> None:
        state: Anchor = me.state
        if state.under_way:  # a run that continues
            self._begin(me, state)
        while me.training:
            me.optimizer_step(await me.gradient())
            if me.step % self.period == 0:
                await self._arrive(me, state)
                me.params -= self.alpha * (me.params - state.model)
                state.mean[:] = me.params
                self._begin(me, state)

    def _begin(self, me: Worker, state: Anchor) -> None:
        state.under_way = True
        me.background("anchor", self._average(me, copied(state.mean)), "replayed")

    async def _average(self, me: Worker, array: FlatArray) -> FlatArray:
        await self.collective.average(me, array)
        return array

    async def _arrive(self, me: Worker, state: Anchor) -> None:
        """Move the anchor to the average in progress, if there is one, waiting for it."""
        if not state.under_way:
            return
        mean: FlatArray = await me.finished(me.task("anchor"))
        state.under_way = False
        state.velocity *= self.beta
        state.velocity += mean - state.model
        state.model += state.velocity

    async def finish(self, me: Worker) -> None:
        """Wait for the last average, in which every worker takes part, then leave the run."""
        await self._arrive(me, me.state)
        me.leave()
