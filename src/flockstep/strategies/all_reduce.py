"""Synchronous data parallelism: every step, everyone's mean gradient."""

from __future__ import annotations

from dataclasses import dataclass, field

from flockstep.collectives.base import Collective
from flockstep.collectives.ring import Ring
from flockstep.nodes import Worker
from flockstep.strategies.base import Cell, Strategy, Traits


@dataclass(frozen=True)
class AllReduce(Strategy):
    """Synchronous all-reduce SGD (Baidu 2017; Sergeev & Del Balso 2018).

    w ← w - η · (1/n) Σ g_i on every worker. The replicas are equal in every bit after every step.
    """

    collective: Collective = field(default_factory=Ring)

    @property
    def traits(self) -> Traits:
        """Synchronous; a dead worker stops everyone."""
        return Traits(completeness=1, survives=False, results=("rank0", "mean"))

    @property
    def cell(self) -> Cell:
        """Gradients are all-reduced; every worker holds the one model."""
        return Cell("central", "sync", "all-reduce", "replicated PS")

    async def worker(self, me: Worker) -> None:
        """Compute, sum, step."""
        while me.training:
            gradient = await me.gradient()
            await self.collective.average(me, gradient)
            me.record_round()
            me.optimizer_step(gradient)
