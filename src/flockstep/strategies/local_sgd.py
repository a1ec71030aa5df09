"""Local SGD: local steps, then an average of the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from flockstep.arrays.namespace import copied
from flockstep.arrays.schema import FlatArray
from flockstep.collectives.base import Collective
from flockstep.collectives.by_host import ByHost
from flockstep.errors import ConfigurationError
from flockstep.nodes import Worker
from flockstep.strategies.base import Strategy, TaxonomyEntry, Traits
from flockstep.strategies.outer_optimizers.average import Average
from flockstep.strategies.outer_optimizers.base import OuterOptimizer
from flockstep.strategies.resizing import FormerWorker, Resizing
from flockstep.strategies.synchronization_schedules.base import SynchronizationSchedule
from flockstep.strategies.synchronization_schedules.fixed import Fixed


@dataclass
class LocalSgdState:
    """A worker's state: the step of the last average, the state of the synchronization schedule, and the state of the
    outer optimizer.
    """

    period: Any
    met: int = 0
    model: FlatArray | None = None
    """The parameters (K,) from which all replicas started after the last average; None without an outer optimizer."""
    outer_state: Any = None
    due: bool = False
    """Whether the worker is in an average, which is taken again if others are lost in it."""


@dataclass(frozen=True)
class LocalSGD(Strategy):
    """Local SGD, parameter averaging (McDonald, Hall & Mann 2010; Stich 2019): local steps, then an average.

    Every worker takes `period` (H) steps independently, then w_i ← mean_j w_j; in T steps there are floor(T/H)
    averages. Momentum and other optimizer state stay local. With H = 1 and plain SGD the strategy equals synchronous
    SGD up to rounding. The period may be a number or a synchronization schedule, as in post-local SGD; an
    `outer_optimizer` applies an additional step to the mean, as in DiLoCo and BMUF. With H = 50 the strategy is
    SparkNet (Moritz et al. 2016), with a collective in place of SparkNet's driver.

    `weighting` is the weight of a replica in the mean. "equal" is 1/n, because every worker computes the same number of
    samples between two averages. "samples" is n_i/N for a worker with n_i of the N training samples, as in FedAvg
    (McMahan et al. 2017, algorithm 1) and in DiLoCo on unequal shards: the mean loss over all samples is then minimized
    even if the workers' parts differ in size, as with `dirichlet`.
    """

    period: int | SynchronizationSchedule = 10
    collective: Collective = field(default_factory=ByHost)
    outer_optimizer: OuterOptimizer = field(default_factory=Average)
    weighting: Literal["equal", "samples"] = "equal"

    def __post_init__(self) -> None:
        _ = self.schedule  # refuses a number below 1
        if self.weighting not in ("equal", "samples"):
            raise ConfigurationError(
                f"weighting must be equal or samples, got {self.weighting}; leave it out for equal"
            )

    @cached_property
    def schedule(self) -> SynchronizationSchedule:
        """The averaging schedule; a `period` that is a number is a fixed schedule."""
        return self.period if isinstance(self.period, SynchronizationSchedule) else Fixed(self.period)

    @property
    def traits(self) -> Traits:
        """The strategy's traits: synchronous delivery if the replicas are averaged after every step, otherwise bounded
        delay. The death of a worker stops all workers.
        """
        schedule = self.schedule
        return Traits(
            delivery="synchronous" if schedule.every_step else "bounded delay",
            survives=False,
            results=("mean", "rank0", "best"),
            needs_job=schedule.needs_job or self.weighting == "samples",
        )

    taxonomy_entry = TaxonomyEntry("decentral", "sync", "reduce", "dedicated master")

    @property
    def steps_alone(self) -> bool:
        return type(self).worker is LocalSGD.worker

    @property
    def repeats(self) -> Literal["", "step", "round"]:
        # Other schedules ask for the step of the run or its learning rate, which a change of the workers changes at
        # another local step on each of them.
        return "round" if isinstance(self.schedule, Fixed) and not self.outer_optimizer.resets else ""

    resizing = Resizing(replicas="own", common=("model", "outer_state"))

    def replica(self, former: FormerWorker) -> tuple[FlatArray, float]:
        state: LocalSgdState = former.state
        ended = state.model is not None and 0 < state.met == former.step
        return (state.model if ended and state.model is not None else former.params), 1.0

    def take_over(self, me: Worker, former: Sequence[FormerWorker]) -> None:
        super().take_over(me, former)
        self.outer_optimizer.resize(me.state.outer_state, me.workers)

    def go_on(self, me: Worker, state: LocalSgdState) -> None:
        me.state = state
        self.outer_optimizer.resize(state.outer_state, me.workers)

    def worker_state(self, me: Worker) -> LocalSgdState:
        """Return the state of a worker before the first average. When a new model replaces the old model, the
        schedule's state is kept.
        """
        period = me.state.period if isinstance(me.state, LocalSgdState) else self.schedule.start(me)
        if not self.outer_optimizer.moves:
            return LocalSgdState(period)
        return LocalSgdState(
            period, model=copied(me.params), outer_state=self.outer_optimizer.start(me.params, me.workers)
        )

    async def worker(self, me: Worker) -> None:
        state: LocalSgdState = me.state
        if state.model is not None and 0 < state.met == me.step:
            me.params[:] = state.model  # a run that continues after its result was taken
        if state.due:
            await self.meet(me, state)
        while me.training:
            me.optimizer_step(await me.gradient())
            await self.after_step(me, me.state)

    async def after_step(self, me: Worker, state: LocalSgdState) -> None:
        """Average the replicas if the schedule says that an average is due, and let the outer optimizer take its
        step.
        """
        if self.schedule.due(me, state.period, me.step - state.met):
            await self.meet(me, state)

    async def meet(self, me: Worker, state: LocalSgdState) -> None:
        """Average the replicas, and let the outer optimizer take its step."""
        state.due = True
        me.hold()
        since = me.step - state.met
        if self.weighting == "samples":
            me.params *= me.workers * me.samples / me.train_size
        await self.collective.average(me, me.params)
        if state.model is not None:
            self.outer_optimizer.follow(me, state.outer_state)
            self.outer_optimizer.move(state.model, me.params, state.outer_state)
            me.params[:] = state.model
        if self.outer_optimizer.resets:
            me.stepper.reset(me.params)
        me.record_round(since)
        state.met = me.step
        await self.schedule.met(me, state.period, self.collective)
        state.due = False
        me.hold(ended=True)

    async def finish(self, me: Worker) -> None:
        """Take the outer optimizer's result if the last step ended with an average, then leave the run."""
        state: LocalSgdState = me.state
        if state.model is not None and 0 < state.met == me.step:
            me.params[:] = self.outer_optimizer.result(state.model, state.outer_state)
        me.leave()
