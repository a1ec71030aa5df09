"""Trials: runs in virtual time that compute real gradients and end at the target, to find what a plan cannot
predict.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.collectives import costs
from flockstep.collectives.recursive_doubling import RecursiveDoubling
from flockstep.collectives.ring import Ring
from flockstep.errors import ConfigurationError, Diverged
from flockstep.frameworks.base import Engine, Job
from flockstep.frameworks.job import make_engine
from flockstep.launchers.threads import limit_threads
from flockstep.messages import HEADER_BYTES, server
from flockstep.planning.job_profile import Site
from flockstep.planning.step_prediction import ALONE
from flockstep.records.events import EvaluationEvent, Event
from flockstep.runtime.plan import Plan
from flockstep.runtime.runner import Runner, reporting_users_errors
from flockstep.runtime.tracker import FINAL
from flockstep.runtime.virtual import Simulation
from flockstep.simulation.compute import ComputeModel, ConstantTime, Speeds
from flockstep.simulation.handling import Longer
from flockstep.simulation.law import mean_of
from flockstep.simulation.network import Link
from flockstep.strategies.all_reduce import AllReduce
from flockstep.strategies.base import Strategy, choose_result
from flockstep.workloads.sampler import steps_for
from flockstep.workloads.split import Split

End = Literal["target", "steps", "time", "diverged"]
FINE = 200
"""Smallest number of evaluations in a trial that takes all its steps; if the trial has fewer steps, there is one
evaluation per step.
"""
DEAR = 2
"""Number of training samples per test sample between two evaluations, which limits the share of real time spent on
evaluations.
"""
LEFT_OUT = (
    "in trials, adding received arrays and the computations of servers take no time",
    "in trials, a sender encodes the whole model at every gradient",
    "if workers have different models, a trial ends with averaging the models once, over the slowest link",
    "no node fails in a trial, and each trial draws its random times only once",
    "trials choose the learning rate with one seed, and no other hyper-parameter of a strategy",
)
"""Sentences about effects that are not part of the virtual seconds of a trial."""


@dataclass(frozen=True)
class Trial:
    """The result of one trial. Seconds are virtual; bytes are the mean payload bytes that a worker sent."""

    strategy: str
    workers: int
    lr: float
    seed: int
    target: float
    end: End
    """Text that says why the trial ended: the target, the last step, the time limit, or divergence."""
    seconds_to_target: float | None
    """Virtual seconds to target, including one averaging of the replicas if the replicas differ; None if the target was
    missed.
    """
    seconds: float
    """Virtual seconds at the end of the trial."""
    steps: float
    """Mean number of steps of a worker until the evaluation that reached the target; until the last evaluation if none
    reached the target.
    """
    sent_bytes: float
    """Mean payload bytes that a worker sent until the evaluation to which `steps` refers."""
    metric: float | None
    """Metric of the evaluation to which `steps` refers; None if the metric is not finite or there was no evaluation."""
    best: float | None
    """Best value of the metric over all evaluations of the trial."""
    loss: float | None = None
    """Loss of the evaluation to which `steps` refers."""


@dataclass
class TrialContext:
    """The data and the engines that the trials of a job share."""

    site: Site
    _jobs: dict[int, Job] = field(default_factory=dict)
    _engines: dict[int, Engine] = field(default_factory=dict)

    def job(self, seed: int) -> Job:
        """Return the job of a run, and read its data only once.

        Raises:
            ConfigurationError: only the sizes of the task are known.
        """
        if seed not in self._jobs:
            make = self.site.task.job
            if make is None:
                raise ConfigurationError(
                    f"{self.site.task.name} describes only sizes and has no data, so no model can be trained; give a "
                    "job, such as digits, or a Python file with job()"
                )
            job = make(seed)
            data = job.data()
            self._jobs[seed] = dataclasses.replace(job, data=lambda: data)
        return self._jobs[seed]

    def engine(self, seed: int) -> Engine:
        """Return the engine for a trial's gradients: a new engine if the model has buffers, which an earlier trial has
        changed.
        """
        if seed not in self._engines:
            limit_threads(1)
            engine = make_engine(self.job(seed), seed)
            limit_threads(1)  # also the libraries that the job has imported
            if len(engine.buffers(0)):
                return engine
            self._engines[seed] = engine
        return self._engines[seed]


@dataclass(frozen=True)
class TrialSettings:
    """How a trial trains, and when it ends."""

    target: float | None = None
    """Metric to reach; None for the job's target."""
    by_loss: bool = False
    """Whether `target` is a loss."""
    lr: float | None = None
    """Learning rate; None for the job's learning rate."""
    seed: int = 0
    """Seed of data order and random draws."""
    steps: int | None = None
    """Largest number of steps of a worker; None for the number that one worker alone takes in the job's epochs."""
    within: float = math.inf
    """Virtual seconds after which the trial ends."""
    split: str | Split = "iid"
    """How the data is split over the workers."""
    every: int | None = None
    """Number of steps between two evaluations; None for few evaluations."""
    live: bool = False
    """Whether the current model is evaluated, as `LiveSimulation` does, instead of the model after the same number of
    steps of all nodes.
    """


def trial(
    site: Site,
    strategy: Strategy | None,
    workers: int,
    settings: TrialSettings,
    *,
    context: TrialContext | None = None,
    heed: Callable[[float, float], None] = lambda steps, seconds: None,
) -> Trial:
    """Train until the target is reached; a `strategy` of None stands for one worker on the fastest machine.

    Args:
        site: the task and the cluster.
        strategy: the strategy; None for one worker alone.
        workers: number of workers.
        settings: how the trial trains, and when it ends.
        context: data and engines that trials share.
        heed: function that is called after every gradient with the mean steps of a worker and the virtual seconds; an
            exception that it raises ends the trial without a result.

    Raises:
        ConfigurationError: the task has no data or no target, or the strategy cannot run with this number of workers.
    """
    context, target, seed = context or TrialContext(site), settings.target, settings.seed
    job = context.job(seed)
    goal = target if settings.by_loss and target is not None else goal_of(job, target)
    engine = context.engine(seed)
    optimizer = engine.optimizer if settings.lr is None else engine.optimizer.with_lr(settings.lr)
    count = 1 if strategy is None else workers
    chosen = AllReduce() if strategy is None else strategy
    chosen.check(count)
    most = settings.steps or max(job.least_steps, steps_for(job.epochs, engine.train_size, 1, job.batch))
    plan = Plan(
        chosen,
        chosen.cluster(count),
        optimizer,
        Split.parse(settings.split).assign(engine.labels, engine.train_size, count, seed),
        job.batch,
        most,
        seed,
        choose_result(chosen, None),
        settings.every or _every(job, count, most),
    )
    # The gradient, the optimizer step, encoding and decoding of a worker's step.
    if strategy is None:
        law: ComputeModel = Longer(_fastest(site), site.task.elements / site.rate("optimizer", site.optimizer))
    else:
        law = Longer(site.compute(workers), site.work(strategy, workers).step)
    network = Link(math.inf) if count == 1 else site.cluster.network(count)
    average = averaging(site, count) if plan.result == "mean" else (0.0, 0.0)
    higher = job.higher_is_better and not settings.by_loss
    watch = _Watch(goal, higher, settings.by_loss, settings.within, *average)

    def step(steps: int, now: float) -> None:
        heed(steps / count, now)
        watch.step(now)

    run = (LiveSimulation if settings.live else Simulation)(engine, plan, law, network, watch.emit, step)
    end: End = "time"
    try:
        with reporting_users_errors(), suppress(_Over):
            run.run()
            end = "steps"
    except Diverged:
        end = "diverged"
    finally:
        run.close()
    return watch.trial(ALONE if strategy is None else str(strategy), plan, end)


def goal_of(job: Job, target: float | None) -> float:
    """Return the value of the metric that a trial has to reach.

    Raises:
        ConfigurationError: neither the job nor the caller has a target, or the target is not a valid accuracy.
    """
    goal = job.target if target is None else target
    if goal is None or not math.isfinite(goal):
        raise ConfigurationError(
            f"time to target needs a finite target, got {goal} of {job.name}; give a target with --target, such as 0.95"
        )
    if job.metric == "accuracy" and not 0 < goal <= 1:
        raise ConfigurationError(
            f"the target of {job.name} must be an accuracy > 0 and <= 1, got {goal:g}; give a target such as 0.95"
        )
    return goal


def averaging(site: Site, workers: int) -> tuple[float, float]:
    """Return the seconds and the bytes per worker of one averaging of the replicas over the slowest link."""
    latency, bandwidth = site.link
    if workers == 1 or bandwidth == math.inf:
        return 0.0, 0.0
    link, task = costs.LinkModel(latency, 1 / bandwidth, HEADER_BYTES), site.task
    ways = Ring(), RecursiveDoubling()
    best = min(ways, key=lambda way: way.cost(workers, task.nbytes, link))
    return best.cost(workers, task.nbytes, link), task.itemsize * best.sent_elements(workers, task.elements, 0)


def _fastest(site: Site) -> ComputeModel:
    """The compute model of a worker that has the fastest machine to itself."""
    speed = max(group.speed for group in site.cluster.groups)
    law, mean = site.cluster.law, mean_of(site.cluster.law)
    if site.seconds is None:
        return Speeds(law, (1 / speed,))
    return ConstantTime(site.seconds / speed) if mean == 0 else Speeds(law, (site.seconds / mean / speed,))


def _every(job: Job, workers: int, steps: int) -> int:
    """Number of steps between two evaluations, chosen so that evaluating takes no more real time than training."""
    tested = len(job.data().test_y)
    return max(1, min(steps // FINE, math.ceil(tested / (DEAR * job.batch * workers))))


class _Over(Exception):
    """Raised to end a trial before its last step."""


@dataclass
class _Watch:
    """Listens to the events of a run and ends the run at the target or the time limit."""

    goal: float
    higher: bool
    by_loss: bool
    """Whether the goal is a loss in place of a metric."""
    within: float
    averaging: float
    """Seconds of averaging the replicas, if the result is their mean and they differ."""
    averaged: float
    """Bytes of averaging the replicas."""
    now: float = 0.0
    seen: list[EvaluationEvent] = field(default_factory=list)
    hit: tuple[float, EvaluationEvent, float] | None = None
    """Time at which the target is reached, the evaluation, and the bytes sent; a later evaluation may need no
    averaging.
    """

    def emit(self, event: Event) -> None:
        """Handle evaluations, and ignore other events."""
        if not isinstance(event, EvaluationEvent):
            return
        self.step(event.seconds)
        self.seen.append(event)
        value = self._value(event)
        if not (value >= self.goal if self.higher else value <= self.goal):
            return
        apart = event.divergence != 0
        reached = event.seconds + (self.averaging if apart else 0.0)
        if reached <= self.within and (self.hit is None or reached < self.hit[0]):
            self.hit = reached, event, event.sent_bytes + (self.averaged if apart else 0.0)
        self.step(event.seconds)

    def step(self, now: float) -> None:
        """Advance the time, and end the trial if it is over."""
        self.now = max(self.now, now)
        if now > self.within or (self.hit is not None and self.now >= self.hit[0]):
            raise _Over

    def _value(self, event: EvaluationEvent) -> float:
        return event.loss if self.by_loss else event.metric

    def trial(self, name: str, plan: Plan, end: End) -> Trial:
        """Return the result of the trial."""
        known = [one for one in map(self._value, self.seen) if math.isfinite(one)]
        last = self.seen[-1] if self.seen else None
        reached, last, sent = self.hit or (None, last, 0.0 if last is None else last.sent_bytes)
        return Trial(
            name,
            plan.cluster.workers,
            plan.optimizer.lr,
            plan.seed,
            self.goal,
            end if self.hit is None else "target",
            reached,
            min(self.now, self.within) if reached is None else reached,
            0.0 if last is None else last.step,
            sent,
            self._value(last) if last is not None and math.isfinite(self._value(last)) else None,
            (max if self.higher else min)(known, default=None),
            last.loss if last is not None and math.isfinite(last.loss) else None,
        )


NOW = ("server", "mean", "rank0")
"""Result policies whose model is available at every moment of a run."""


class LiveSimulation(Simulation):
    """A simulation whose snapshots show the model at the time of the snapshot: on average, one snapshot for every
    gradient of each worker.

    In contrast, the snapshots of a record show the model after the same number of steps of all nodes, and are as late
    as the slowest node. If workers differ in speed and do not wait for each other, the current model is then far ahead,
    and determines the time to target.
    """

    _begun = 0

    def _send_snapshot(self, runner: Runner, tick: float, params: FlatArray | None = None) -> None:
        if tick == FINAL or self.plan.result not in NOW:
            super()._send_snapshot(runner, tick, params)
            return
        if runner.node.address < 0:
            return
        workers = range(self.plan.cluster.workers)
        self._begun += 1
        if self._begun % len(workers):
            return
        # All workers have the last update.
        steps = (self._begun // len(workers) - 1) * self.plan.evaluate_every
        found = self._engine.evaluate(self._model(), workers)
        sent = sum(self.runners[rank].metrics.traffic.sent_bytes for rank in workers) / len(workers)
        replicas = self._gradients.params
        apart = float(np.abs(replicas - replicas[0]).max()) if self.plan.result == "mean" else 0.0
        samples = len(workers) * self.plan.samples_at(steps)
        self._emit(EvaluationEvent(self.now, steps, samples, sent, found.loss, found.metric, apart))

    def _model(self) -> FlatArray:
        replicas = self._gradients.params
        model: FlatArray = replicas[0]
        if self.plan.result == "mean":
            model = replicas.mean(0, dtype=np.float64).astype(replicas.dtype)
        elif self.plan.result == "server":
            model = np.empty_like(replicas[0])
            for index, part in reversed(list(enumerate(self.plan.held(len(model))))):
                processes = [one for one in self.plan.cluster.chain(server(index)) if one not in self._dead]
                model[part] = self.runners[processes[0]].node.params
        return model
