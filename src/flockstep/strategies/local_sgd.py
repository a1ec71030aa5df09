"""Local steps, then an average of the parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from flockstep.arrays.namespace import copied
from flockstep.arrays.schema import FlatArray
from flockstep.collectives.base import Collective
from flockstep.collectives.ring import Ring
from flockstep.errors import ConfigurationError
from flockstep.expression import searched
from flockstep.nodes import Worker
from flockstep.strategies.base import Cell, Strategy, Traits
from flockstep.strategies.outer.average import Average
from flockstep.strategies.outer.base import Outer
from flockstep.strategies.periods.base import Period
from flockstep.strategies.periods.fixed import Fixed


@dataclass
class Meetings:
    """What a worker remembers: the step of the last meeting, and what period and outer optimiser remember."""

    period: Any
    met: int = 0
    model: FlatArray | None = None
    """What all replicas began from at the last meeting, (K,); kept only for an outer optimiser that moves it."""
    outer: Any = None


@dataclass(frozen=True)
class LocalSGD(Strategy):
    """Local SGD, or parameter averaging (McDonald, Hall & Mann 2010; Stich 2019).

    Every worker takes `period` (H) steps of its own, then w_i ← mean_j w_j; floor(T/H) averages in T steps. Momentum
    and other optimizer state stay local. With H = 1 and plain SGD this equals synchronous SGD up to rounding. The
    period may be a number or a rule of its own, as in post-local SGD; an `outer` optimizer makes more of the mean, as
    in DiLoCo and BMUF. With H = 50 it is SparkNet (Moritz et al. 2016), but for the collective in place of a driver.

    `weighting` says how much a replica counts in the mean. "equal": 1/n, as every worker computes equally many samples
    between two averages. "samples": n_i/N of worker i's share of the N training samples, as in FedAvg (McMahan et al.
    2017, algorithm 1) and in DiLoCo on unequal shards: what is minimized is then the mean loss over all samples also
    where parts differ in size, as `dirichlet` deals them out.
    """

    period: int | Period = field(default=10, metadata=searched(1, 128))
    collective: Collective = field(default_factory=Ring)
    outer: Outer = field(default_factory=Average)
    weighting: Literal["equal", "samples"] = "equal"

    def __post_init__(self) -> None:
        if isinstance(self.period, int) and self.period < 1:
            raise ConfigurationError(f"period must be >= 1 local steps, got {self.period}; 1 averages after every step")
        if self.weighting not in ("equal", "samples"):
            raise ConfigurationError(
                f"weighting must be equal or samples, got {self.weighting}; leave it out for equal"
            )

    @property
    def rhythm(self) -> Period:
        """The period as a rule."""
        return self.period if isinstance(self.period, Period) else Fixed(self.period)

    @property
    def traits(self) -> Traits:
        """Every update reaches everyone at the next average; a dead worker stops everyone."""
        rhythm = self.rhythm
        return Traits(
            completeness=1 if rhythm.every_step else 2,
            survives=False,
            results=("mean", "rank0", "best"),
            needs_job=rhythm.needs_job or self.weighting == "samples",
        )

    cell = Cell("decentral", "sync", "reduce", "dedicated master")

    def worker_state(self, me: Worker) -> Meetings:
        """Nobody has met; an outer optimizer begins at the common start. A period outlasts a new model."""
        period = me.state.period if isinstance(me.state, Meetings) else self.rhythm.start(me)
        if not self.outer.moves:
            return Meetings(period)
        return Meetings(period, model=copied(me.params), outer=self.outer.start(me.params, me.workers))

    async def worker(self, me: Worker) -> None:
        """Step; meet when it is due."""
        state: Meetings = me.state
        if state.model is not None and 0 < state.met == me.step:
            me.params[:] = state.model  # a run that goes on after its result was taken
        while me.training:
            me.optimizer_step(await me.gradient())
            await self.after_step(me, me.state)

    async def after_step(self, me: Worker, state: Meetings) -> None:
        """Average, and let the outer optimiser make the next model of it, if it is time to."""
        since = me.step - state.met
        if not self.rhythm.due(me, state.period, since):
            return
        if self.weighting == "samples":
            me.params *= me.workers * me.samples / me.train_size
        await self.collective.average(me, me.params)
        if state.model is not None:
            self.outer.move(state.model, me.params, state.outer)
            me.params[:] = state.model
        if self.outer.resets:
            me.stepper.reset(me.params)
        me.record_round(since)
        state.met = me.step
        await self.rhythm.met(me, state.period, self.collective)

    async def finish(self, me: Worker) -> None:
        """Where the last step ended with a meeting, take the outer optimizer's result."""
        state: Meetings = me.state
        if state.model is not None and 0 < state.met == me.step:
            me.params[:] = self.outer.result(state.model, state.outer)
        me.leave()
