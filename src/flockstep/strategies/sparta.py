"""SPARTA, sparse parameter averaging: after each local step, workers average a small part of the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from flockstep.arrays.schema import FlatArray
from flockstep.collectives.base import Collective
from flockstep.collectives.by_host import ByHost
from flockstep.errors import require
from flockstep.nodes import Worker
from flockstep.strategies.base import Strategy, TaxonomyEntry, Traits
from flockstep.strategies.local_sgd import LocalSGD, LocalSgdState
from flockstep.strategies.resizing import FormerWorker, Resizing
from flockstep.strategies.selectors.base import Selector
from flockstep.strategies.selectors.random import RandomSelector


@dataclass(frozen=True)
class Sparta(Strategy):
    """SPARTA, sparse parameter averaging (Beton et al. 2025, section 3): every step averages a small random part of the
    parameters.

    After each local step, every worker replaces the same random share p of its parameters with their mean over the
    workers. The selection follows from a common `seed`, so that no index is sent: 2 (n-1)/n p K elements per worker and
    step. Gradients and optimizer state stay local. With `full`, for example local_sgd(100, outer_optimizer=nesterov),
    the whole model is also averaged from time to time: SPARTA inside DiLoCo, which then tolerates longer periods.
    """

    p: float = 0.005
    selector: Selector = field(default_factory=RandomSelector)
    full: LocalSGD | None = None
    collective: Collective = field(default_factory=ByHost)
    seed: int = 0

    def __post_init__(self) -> None:
        require(0 < self.p <= 1, "p of sparta", "in (0, 1]", self.p, "0.005 is usual, and 1 averages all elements")
        require(self.seed >= 0, "seed of sparta", ">= 0", self.seed, "0 is usual")

    @property
    def traits(self) -> Traits:
        """The strategy's traits: partial delivery, or the delivery of `full` if it is given. The death of a worker
        stops all workers.
        """
        if self.full is not None:
            return replace(self.full.traits, approximation="sent later")
        return Traits(delivery="partial", survives=False, results=("mean", "rank0", "best"), approximation="sent later")

    taxonomy_entry = TaxonomyEntry("decentral", "sync", "reduce", "dedicated master")

    @property
    def resizing(self) -> Resizing:
        """The rule by which replicas change when workers leave or join: the rule of `full` if it is given; otherwise,
        each remaining worker keeps its replica.
        """
        return Resizing(replicas="own") if self.full is None else self.full.resizing

    def replica(self, former: FormerWorker) -> tuple[FlatArray, float]:
        return super().replica(former) if self.full is None else self.full.replica(former)

    def take_over(self, me: Worker, former: Sequence[FormerWorker]) -> None:
        if self.full is not None:
            self.full.take_over(me, former)

    def worker_state(self, me: Worker) -> LocalSgdState | None:
        return None if self.full is None else self.full.worker_state(me)

    async def worker(self, me: Worker) -> None:
        while me.training:
            me.optimizer_step(await me.gradient())
            if me.workers > 1:
                chosen = self.selector.pick(len(me.params), self.p, self.seed, me.run_step - 1)
                values = me.params[chosen]
                await self.collective.average(me, values)
                me.params[chosen] = values
            if self.full is not None:
                await self.full.after_step(me, me.state)
