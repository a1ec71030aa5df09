"""One run in virtual time with real gradients, ended when the target is reached: what a plan cannot know without it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from flockstep.collectives import costs
from flockstep.collectives.recursive_doubling import RecursiveDoubling
from flockstep.collectives.ring import Ring
from flockstep.drivers.plan import Plan
from flockstep.drivers.virtual import Simulation
from flockstep.errors import ConfigurationError, Diverged
from flockstep.frameworks.base import Engine, Job
from flockstep.frameworks.job import make_engine
from flockstep.launchers.threads import limit_threads
from flockstep.messages import HEADER_BYTES
from flockstep.nodes import Cluster
from flockstep.planning.live import LiveSimulation
from flockstep.planning.prospect import ALONE
from flockstep.planning.task import Site
from flockstep.records.events import Event, Snapshot
from flockstep.simulation.compute import ComputeModel, Constant, Speeds
from flockstep.simulation.handling import Longer
from flockstep.simulation.law import mean_of
from flockstep.simulation.network import Link, Network
from flockstep.strategies.all_reduce import AllReduce
from flockstep.strategies.base import Strategy, choose_result
from flockstep.workloads.sampler import steps_for
from flockstep.workloads.split import Split

End = Literal["target", "steps", "time", "diverged"]
FINE = 200
"""Evaluations of a run that goes on to its last step, at the least; one every step where there are fewer steps."""
DEAR = 2
"""Training samples per test sample between two evaluations, where that is often enough: real time, not virtual."""
LEFT_OUT = (
    "in trials adding up what arrives, and what servers compute, takes no time",
    "in trials whoever encodes does so with the whole model at every gradient",
    "where workers' models differ, trials end with averaging them once, on the slowest link",
    "nothing fails in trials, and each has one set of random times",
)
"""What the virtual seconds of a trial do not know."""


@dataclass(frozen=True)
class Trial:
    """How far one run came. Seconds are virtual; bytes are payloads that a worker sent, in the mean."""

    strategy: str
    workers: int
    lr: float
    seed: int
    target: float
    end: End
    """Why it ended: at the target, after its last step, after as much time as it was given, by diverging."""
    seconds_to_target: float | None
    """With what it takes to average the workers' models once, where they differ then; None: not reached."""
    seconds: float
    """When it ended."""
    steps: float
    """Of a worker, in the mean, until the evaluation at which the target was reached, or else the last one."""
    bytes: float
    """Until then."""
    metric: float | None
    """At that evaluation; None where it is no number or there was none."""
    best: float | None
    """The best of all evaluations."""

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return dataclasses.asdict(self)


@dataclass
class Bench:
    """What the trials of a job share: its data and, where gradients leave nothing behind, what computes them."""

    site: Site
    _jobs: dict[int, Job] = field(default_factory=dict)
    _engines: dict[int, Engine] = field(default_factory=dict)

    def job(self, seed: int) -> Job:
        """The job of a run, whose data is read once.

        Raises:
            ConfigurationError: the task has sizes only.
        """
        if seed not in self._jobs:
            make = self.site.task.job
            if make is None:
                raise ConfigurationError(
                    f"{self.site.task.name} has sizes but no data, so that nothing can be trained; give a job, such as "
                    "digits, or a file with job()"
                )
            job = make(seed)
            data = job.data()
            self._jobs[seed] = dataclasses.replace(job, data=lambda: data)
        return self._jobs[seed]

    def engine(self, job: Job, seed: int) -> Engine:
        """What computes gradients; a new one where replicas have buffers, which an earlier trial has changed."""
        if seed not in self._engines:
            limit_threads(1)
            engine = make_engine(job, seed)
            limit_threads(1)  # of what the job has imported too
            if len(engine.buffers(0)):
                return engine
            self._engines[seed] = engine
        return self._engines[seed]


def trial(
    site: Site,
    strategy: Strategy | None,
    workers: int,
    *,
    target: float | None = None,
    lr: float | None = None,
    seed: int = 0,
    steps: int | None = None,
    within: float | None = None,
    split: str | Split = "iid",
    every: int | None = None,
    live: bool = False,
    bench: Bench | None = None,
    heed: Callable[[float, float], None] = lambda steps, seconds: None,
) -> Trial:
    """Train until the target is reached; None for one worker on the fastest machine.

    `target`, `lr`: None for the job's own. `steps` of a worker at the most: None for what one worker alone takes for
    the job's epochs. `within`: virtual seconds after which it is over.
    `every`: steps between two evaluations, None for few. `live`: evaluate the model that is there at the moment, as
    `LiveSimulation` does, and not, as a record, what all nodes had after as many steps.
    `bench` saves reading the data again.
    `heed` hears after every gradient how many steps a worker has taken, in the mean, and how late it is; what it raises
    ends the trial without a result.

    Raises:
        ConfigurationError: the task has no data, or no target; the strategy cannot run on so many workers.
    """
    bench = bench or Bench(site)
    job = bench.job(seed)
    goal, engine = goal_of(job, target), bench.engine(job, seed)
    optimizer = engine.optimizer if lr is None else dataclasses.replace(engine.optimizer, lr=lr)  # type: ignore[type-var]
    count = 1 if strategy is None else workers
    chosen = AllReduce() if strategy is None else strategy
    chosen.check(count)
    most = steps or max(job.least_steps, steps_for(job.epochs, engine.train_size, 1, job.batch))
    plan = Plan(
        chosen,
        Cluster(count, chosen.servers_for(count)),
        optimizer,
        Split.parse(split).assign(engine.labels, engine.train_size, count, seed),
        job.batch,
        most,
        seed,
        choose_result(chosen, None),
        every or _every(job, count, most),
    )
    law, network = law_of(site, strategy, count), Link(math.inf) if count == 1 else site.cluster.network(count)
    average = averaging(site, count) if plan.result == "mean" else (0.0, 0.0)
    watch = _Watch(goal, job.higher_is_better, math.inf if within is None else within, *average)
    end = _run(LiveSimulation if live else Simulation, engine, plan, law, network, watch, heed)
    return watch.trial(ALONE if strategy is None else str(strategy), plan, end)


def goal_of(job: Job, target: float | None) -> float:
    """The metric that is to be reached.

    Raises:
        ConfigurationError: neither the job nor anyone else says it, or it is no accuracy where the metric is that.
    """
    goal = job.target if target is None else target
    if goal is None or not math.isfinite(goal):
        raise ConfigurationError(
            f"time to target needs a finite target, got {goal} of {job.name}; give one with --target, such as 0.95"
        )
    if job.metric == "accuracy" and not 0 < goal <= 1:
        raise ConfigurationError(
            f"the target of {job.name} must be an accuracy, above 0 and up to 1, got {goal:g}; give one such as 0.95"
        )
    return goal


def law_of(site: Site, strategy: Strategy | None, workers: int) -> ComputeModel:
    """How long gradients take, with what a worker computes besides: its optimiser's step, encoding and decoding."""
    if strategy is None:
        return Longer(_fastest(site), site.task.elements / site.rate("optimizer", site.optimizer))
    return Longer(site.compute(workers), site.work(strategy, workers).step)


def averaging(site: Site, workers: int) -> tuple[float, float]:
    """Seconds and bytes for a worker, on the slowest link, of averaging models that nobody has averaged yet."""
    latency, bandwidth = site.link
    if workers == 1 or bandwidth == math.inf:
        return 0.0, 0.0
    link, task = costs.Link(latency, 1 / bandwidth, HEADER_BYTES), site.task
    ways = Ring(), RecursiveDoubling()
    best = min(ways, key=lambda way: way.cost(workers, task.nbytes, link))
    return best.cost(workers, task.nbytes, link), task.itemsize * best.sent_elements(workers, task.elements, 0)


def _fastest(site: Site) -> ComputeModel:
    """The law of a worker that has the fastest machine to itself."""
    speed = max(group.speed for group in site.cluster.groups)
    law, mean = site.cluster.law, mean_of(site.cluster.law)
    if site.seconds is None:
        return Speeds(law, (1 / speed,))
    return Constant(site.seconds / speed) if mean == 0 else Speeds(law, (site.seconds / mean / speed,))


def _every(job: Job, workers: int, steps: int) -> int:
    """Steps between two evaluations: few, but such that evaluating takes no more real time than training."""
    tested = len(job.data().test_y)
    return max(1, min(steps // FINE, math.ceil(tested / (DEAR * job.batch * workers))))


class _Over(Exception):
    """The trial has ended before its last step."""


@dataclass
class _Watch:
    """Listens to a run and ends it."""

    goal: float
    higher: bool
    within: float
    averaging: float
    """Seconds that a result which is the mean of workers' models takes to be had, where they differ."""
    averaged: float
    """Bytes of that."""
    now: float = 0.0
    seen: list[Snapshot] = field(default_factory=list)
    hit: tuple[float, Snapshot, float] | None = None
    """When the target is reached, at which evaluation, after how many bytes; a later one may need no averaging."""

    def emit(self, event: Event) -> None:
        """Look at evaluations only."""
        if not isinstance(event, Snapshot):
            return
        self.step(event.t)
        self.seen.append(event)
        if not (event.metric >= self.goal if self.higher else event.metric <= self.goal):
            return
        apart = event.divergence != 0
        reached = event.t + (self.averaging if apart else 0.0)
        if reached <= self.within and (self.hit is None or reached < self.hit[0]):
            self.hit = reached, event, event.bytes + (self.averaged if apart else 0.0)
        self.step(event.t)

    def step(self, now: float) -> None:
        """Time has gone on."""
        self.now = max(self.now, now)
        if self.hit is not None and self.now >= self.hit[0]:
            raise _Over
        if now > self.within:
            raise _Over

    def trial(self, name: str, plan: Plan, end: End) -> Trial:
        """What came of it."""
        known = [one.metric for one in self.seen if math.isfinite(one.metric)]
        reached, last, sent = None, None, 0.0
        if self.hit is not None:
            reached, last, sent = self.hit
        elif self.seen:
            last = self.seen[-1]
            sent = last.bytes
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
            last.metric if last is not None and math.isfinite(last.metric) else None,
            (max if self.higher else min)(known, default=None),
        )


def _run(
    kind: type[Simulation],
    engine: Engine,
    plan: Plan,
    law: ComputeModel,
    network: Network,
    watch: _Watch,
    heed: Callable[[float, float], None],
) -> End:
    def step(steps: int, now: float) -> None:
        heed(steps / plan.cluster.workers, now)
        watch.step(now)

    run = kind(engine, plan, law, network, watch.emit, step)
    try:
        run.run()
    except _Over:
        return "time"
    except Diverged:
        return "diverged"
    return "steps"
