"""What one strategy promises on a cluster: the closed form of its step, or else a rehearsal in virtual time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from flockstep.codecs.base import Codec
from flockstep.costs import order_statistics
from flockstep.costs.setting import Rates as Free
from flockstep.costs.setting import StepCost
from flockstep.costs.steps import NoForm, has_form, step_cost
from flockstep.errors import ConfigurationError
from flockstep.frameworks.job import make_engine
from flockstep.planning.rehearsal import Rehearsal, rehearse
from flockstep.planning.stand_in import Lessons, Unrehearsed
from flockstep.planning.task import Site, Task
from flockstep.simulation.compute import ComputeModel, Constant, SharedCores, SlowSpells
from flockstep.simulation.network import Link
from flockstep.strategies.base import Strategy

ALONE = "one worker"
"""How training without any strategy is named."""
MOST = 64
"""Workers above which nothing is rehearsed: it would take too long."""
FEW = 16
"""Workers up to which everything is rehearsed where links differ, which closed forms cannot say."""
PILING = "nobody waits for messages, but they would pile up: a step counts as long as its bytes take"
SPREAD = 0.01
"""Share of a gradient that the slowest worker has to be late for stragglers to count."""
FACTOR, LENGTH = 5.0, 10
"""Of the slow spells in which a strategy is tried where there are no stragglers."""
LEAST = 1e-12
"""Seconds of a step that computes and sends nothing."""
OFTEN = 0.02
"""Their probability."""


@dataclass(frozen=True)
class Prospect:
    """What a strategy is predicted to do. Seconds and bytes, in the mean, of a step: one gradient of each worker."""

    name: str
    strategy: Strategy | None
    """None: one worker alone."""
    workers: int
    seconds: float
    utilisation: float
    """Share of its time that a worker computes."""
    sent: float
    """Bytes that a worker sends."""
    server_bytes: float
    """Through the busiest server."""
    staleness: float | None
    staleness_bound: int | None
    samples_per_second: float
    memory: float
    """Bytes on a worker."""
    source: Literal["form", "rehearsal"]
    """Where the figures are from."""
    notes: tuple[str, ...] = ()
    memory_is_least: bool = False
    """Whether `memory` leaves out what the strategy itself keeps."""

    @property
    def lossless(self) -> bool:
        """Whether what is sent says exactly what is meant."""
        return all(one.lossless for one in codecs_of(self.strategy))

    def document(self) -> dict[str, Any]:
        """As plain data."""
        names = (
            "name workers seconds utilisation sent server_bytes staleness staleness_bound samples_per_second memory "
            "memory_is_least source"
        )
        return {**{name: getattr(self, name) for name in names.split()}, "notes": list(self.notes)}


def codecs_of(part: Any) -> list[Codec]:
    """Codecs among the parts of a component."""
    if part is None:
        return []
    inner = [value for value in vars(part).values() if hasattr(value, "noun")]
    found = [part] if isinstance(part, Codec) else []
    return found + [codec for one in inner for codec in codecs_of(one)]


def alone(site: Site) -> Prospect:
    """One worker, on the fastest machine, without any messages."""
    seconds = order_statistics.mean(site.cluster.law if site.seconds is None else site.compute(1), 1)
    fastest = max(group.speed for group in site.cluster.groups)
    if site.seconds is not None:
        seconds = site.seconds
    seconds = seconds / fastest + site.task.elements / site.rates(Strategy.parse("ensemble")).optimizer
    task = site.task
    rate = task.batch / seconds if seconds else float("inf")
    return Prospect(ALONE, None, 1, seconds, 1.0, 0.0, 0.0, 0.0, 0, rate, task.nbytes * (2.0 + task.slots), "form")


def prospect(
    strategy: Strategy, site: Site, workers: int, may_rehearse: bool = True, steps: int | None = None
) -> Prospect:
    """The prediction for a strategy; rehearsed where there is no form, or where links differ and workers are few.

    Unless it `may_rehearse`: then what has no form is refused, and every link counts as slow as the slowest. A
    rehearsal has so many `steps`; None: as many as it takes.

    Raises:
        ConfigurationError: the strategy cannot run on so many workers, or nothing can tell what it would take.
    """
    strategy.check(workers)
    uneven = not isinstance(site.cluster.network(workers), Link)
    notes = tuple[str, ...]()
    if uneven and workers <= FEW and may_rehearse:
        try:
            return _rehearsed(strategy, site, workers, steps)
        except Unrehearsed as why:
            if not has_form(strategy):
                raise
            notes += (f"from a closed form, since {why}",)
    try:
        cost = step_cost(strategy, site.setting(strategy, workers))
    except NoForm:
        if not may_rehearse:
            raise
        return _rehearsed(strategy, site, workers, steps)
    notes = cost.notes + notes + (("every link counts as slow as the slowest",) if uneven else ())
    least = _least(cost.sent, site)
    if least > cost.seconds:
        notes += (PILING,)
        cost = _slowed(cost, least)
    return _of_cost(strategy, workers, cost, notes)


def _least(sent: float, site: Site) -> float:
    """Seconds that a worker's card takes to send so many bytes."""
    return sent / site.link[1]


def _slowed(cost: StepCost, seconds: float) -> StepCost:
    """The same work in more time."""
    by = cost.seconds / seconds
    utilisation, rate = by * cost.utilisation, by * cost.samples_per_second
    return replace(cost, seconds=seconds, utilisation=utilisation, samples_per_second=rate)


def _of_cost(strategy: Strategy, workers: int, cost: StepCost, notes: tuple[str, ...]) -> Prospect:
    return Prospect(
        str(strategy),
        strategy,
        workers,
        cost.seconds,
        cost.utilisation,
        cost.sent,
        cost.server_bytes,
        cost.staleness,
        cost.staleness_bound,
        cost.samples_per_second,
        cost.memory,
        "form",
        notes,
    )


def _apart(strategy: Strategy, site: Site, workers: int) -> float:
    """Seconds of a step that go into coding and updating, of which a rehearsal knows nothing."""
    setting = site.setting(strategy, workers)
    try:
        return max(
            0.0, step_cost(strategy, setting).seconds - step_cost(strategy, replace(setting, rates=Free())).seconds
        )
    except NoForm:
        coding = any(not one.lossless for one in codecs_of(strategy))
        return setting.updating(setting.elements) + (setting.elements / setting.rates.encode if coding else 0.0)


def _rehearsed(strategy: Strategy, site: Site, workers: int, steps: int | None) -> Prospect:
    if workers > MOST:
        raise ConfigurationError(
            f"{strategy} has no closed form, and {workers} workers are too many to rehearse; plan for {MOST} or fewer"
        )
    task = site.task
    found = rehearse(
        strategy,
        workers,
        task.nbytes,
        site.compute(workers),
        site.cluster.network(workers),
        tensors=task.tensors,
        dtype_bytes=task.itemsize,
        optimizer=task.optimizer,
        steps=steps,
        lessons=lessons(strategy, task),
    )
    return _of_rehearsal(strategy, site, workers, found)


def _of_rehearsal(strategy: Strategy, site: Site, workers: int, found: Rehearsal) -> Prospect:
    """With the time that coding, updating and overfull cards and links take on top."""
    task, server = site.task, found.server_sent_per_step
    received = workers * found.sent_per_step / max(1, strategy.servers_for(workers)) if server else 0.0
    played = found.seconds_per_step
    worked = played + _apart(strategy, site, workers)
    pace = found.steps_per_second / workers * played / worked if played else math.inf
    card = _at_least(max(found.sent_per_step, server, received), site, workers)
    seconds = max(worked + found.piling, worked * pace * card if played else card)
    pace = pace * worked / seconds if played else 1 / seconds if seconds else math.inf
    return Prospect(
        str(strategy),
        strategy,
        workers,
        seconds,
        found.utilisation * played / seconds if seconds else 1.0,
        found.sent_per_step,
        server + received,
        found.staleness,
        None,
        found.batches * task.batch * workers * pace,
        task.nbytes * (2.0 + task.slots),
        "rehearsal",
        _remarks(found, seconds > worked),
        memory_is_least=True,
    )


def lessons(strategy: Strategy, task: Task) -> Lessons:
    """What a rehearsal has to know of a job: its samples and layers only where a strategy may ask for them."""
    if not strategy.traits.needs_job or task.job is None:
        return Lessons(task.batch)
    engine = make_engine(task.job(0), 0)
    return Lessons(task.batch, engine.train_size, engine.layers(task.batch))


def _at_least(nbytes: float, site: Site, workers: int) -> float:
    """Seconds in which so many bytes pass a card: where links differ, the fastest, since not all need pass the others.

    One machine whose workers need no link has none to be slow.
    """
    wires = site.cluster.wires
    if isinstance(site.cluster.network(workers), Link):
        return _least(nbytes, site)
    return nbytes / max(wire.bandwidth for wire in wires) if wires else 0.0


def _remarks(found: Rehearsal, piled: bool) -> tuple[str, ...]:
    said = [f"{found.steps} steps in virtual time"]
    if not found.settled:
        said.append("its halves differ by more than 5 %")
    if piled:
        said.append(PILING)
    return (*said, "memory is the least: parameters, gradient, optimiser")


@dataclass(frozen=True)
class Pace:
    """How a strategy's step depends on workers, bandwidth, model and stragglers: cheap enough to be asked often.

    The closed form with constant times, plus `exposure` times what the slowest worker of a step is late in the mean.
    At the plan's own workers and cluster that is the closed form with its random times; elsewhere an approximation.
    """

    strategy: Strategy
    exposure: float
    """How much of the slowest worker's delay everyone takes on: about 1 with a barrier, about 0 without."""
    used: float = 1.0
    """Share of the gradients that count, over what that would be with constant times."""

    def seconds(self, site: Site, workers: int, law: ComputeModel | None = None) -> float:
        """Of a step.

        Raises:
            ConfigurationError: the strategy, or the cluster, cannot have so many workers.
        """
        return self.at(site, workers, law).seconds

    def samples_per_second(self, site: Site, workers: int, law: ComputeModel | None = None) -> float:
        """Of all workers."""
        return self.at(site, workers, law).samples_per_second

    def at(self, site: Site, workers: int, law: ComputeModel | None = None) -> StepCost:
        """The closed form with constant times, but for its seconds and samples per second, which are as above.

        Raises:
            ConfigurationError: as of `seconds`.
        """
        steady, late = _steady(site.compute(workers) if law is None else law, workers)
        self.strategy.check(workers)
        cost = step_cost(self.strategy, site.setting(self.strategy, workers, steady))
        seconds = max(cost.seconds + self.exposure * late, _least(cost.sent, site), LEAST)
        rate = self.used * _counted(cost, site, workers) * workers * site.task.batch / seconds
        return replace(cost, seconds=seconds, samples_per_second=rate)


def pace(found: Prospect, site: Site) -> Pace | None:
    """How a predicted strategy's step depends on circumstances; None where it has no closed form."""
    if found.strategy is None or found.source != "form":
        return None
    law = site.compute(found.workers)
    steady, late = _steady(law, found.workers)
    constant = step_cost(found.strategy, site.setting(found.strategy, found.workers, steady))
    bare, seconds = constant.seconds, found.seconds
    if late <= SPREAD * order_statistics.mean(steady, found.workers):
        law = SlowSpells(steady, OFTEN, FACTOR, LENGTH)
        steady, late = _steady(law, found.workers)
        bare = step_cost(found.strategy, site.setting(found.strategy, found.workers, steady)).seconds
        seconds = step_cost(found.strategy, site.setting(found.strategy, found.workers, law)).seconds
    used = _counted(found, site, found.workers) / (_counted(constant, site, found.workers) or 1.0)
    return Pace(found.strategy, max(0.0, (seconds - bare) / late) if late else 0.0, used)


def _counted(cost: StepCost | Prospect, site: Site, workers: int) -> float:
    """Share of the gradients that count; above 1 where workers take more steps than the mean says."""
    return cost.samples_per_second * cost.seconds / (workers * site.task.batch) if cost.seconds else 1.0


def _steady(law: ComputeModel, workers: int) -> tuple[ComputeModel, float]:
    """The law with its mean for everyone, and how much later than that the slowest of a step is, in the mean."""
    mean = order_statistics.mean(law, workers)
    steady: ComputeModel = Constant(mean)
    if isinstance(law, SharedCores):
        steady = replace(law, base=steady)
    late = order_statistics.slowest(law, workers) - order_statistics.slowest(steady, workers)
    return steady, max(0.0, late)
