"""Local steps, then an average of the parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

from flockstep.collectives.base import Collective
from flockstep.collectives.ring import Ring
from flockstep.errors import ConfigurationError
from flockstep.nodes import Worker
from flockstep.strategies.base import Cell, Strategy, Traits


@dataclass(frozen=True)
class LocalSGD(Strategy):
    """Local SGD, or parameter averaging (McDonald, Hall & Mann 2010; Stich 2019).

    Every worker takes `period` (H) steps of its own, then w_i ← mean_j w_j; floor(T/H) averages in T steps. Momentum
    and other optimiser state stay local. With H = 1 and plain SGD this equals synchronous SGD up to rounding.
    """

    period: int = 10
    collective: Collective = field(default_factory=Ring)

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ConfigurationError(f"period must be >= 1 local steps, got {self.period}; 1 averages after every step")

    @property
    def traits(self) -> Traits:
        """Every update reaches everyone at the next average; a dead worker stops everyone."""
        return Traits(completeness=2 if self.period > 1 else 1, survives=False, results=("mean", "rank0", "best"))

    @property
    def cell(self) -> Cell:
        """Replicas meet at an average; the collective stands in for the master."""
        return Cell("decentral", "sync", "reduce", "dedicated master")

    async def worker(self, me: Worker) -> None:
        """Step; average every `period` steps."""
        while me.training:
            me.optimizer_step(await me.gradient())
            if me.step % self.period == 0:
                await self.collective.average(me, me.params)
                me.record_round(self.period)
