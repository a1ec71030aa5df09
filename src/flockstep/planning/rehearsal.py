"""Rehearsals: predict the cost of a strategy's step by running the strategy's program in virtual time, without
computing gradients.

Only seconds and bytes are needed, so a large model is replaced by a small surrogate, each byte of which stands for many
bytes of the model. Programs, messages, waiting and virtual seconds are those of the real model.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from flockstep.codecs.base import Codec, Shape
from flockstep.errors import ConfigurationError
from flockstep.planning.job_profile import JobProfile
from flockstep.planning.split_surrogate import SplitShape
from flockstep.planning.surrogate import (
    Shrunk,
    SurrogateBatches,
    SurrogateEngine,
    Unrehearsed,
    elements_in,
    longest_cycle,
    scaled,
    shrunk,
)
from flockstep.records.events import Event, NodeEvent, StepEvent, UpdateEvent
from flockstep.runtime.plan import Plan, require_steppable
from flockstep.runtime.runner import reporting_users_errors
from flockstep.runtime.virtual import Simulation
from flockstep.runtime.virtual_split import SplitSimulation
from flockstep.simulation.compute import ComputeModel, ConstantTime
from flockstep.simulation.handling import Handled, Longer, Overheads
from flockstep.simulation.law import late_of, mean_of
from flockstep.simulation.network import Ideal, Network
from flockstep.strategies.base import Strategy, choose_result

Means = np.ndarray[Any, np.dtype[np.float64]]
ELEMENTS = 4096
"""Number of parameters of the surrogate that replaces a large model."""
SMALL, LARGE = 60_000, 5e7
"""SMALL: product of parameters and workers up to which a rehearsal uses the model itself. LARGE: product of parameters,
steps and pairs of workers up to which it does where no surrogate can stand for the model.
"""
STEPS = 40
"""Usual number of steps of a rehearsal whose length is fixed."""
LEFT_OUT = 0.25
"""Share of a rehearsal's steps, at the beginning, that is not counted, because a pipeline must first fill."""
SURE, SURE_OF_BYTES = 0.05, 0.15
"""Ranges of the seconds (SURE) and of the bytes (SURE_OF_BYTES) of a step, as shares of their means, at which a
rehearsal ends. A range is twice the standard error of the mean.
"""
BLOCKS, GRADIENTS = 8, 48
"""Smallest number of counted steps of a worker, which is the number of blocks that tell the standard error of a mean,
and of all workers together.
"""
LONGEST, PATIENCE = 640, 1024
"""LONGEST: largest number of steps of a worker, while nothing was sent. PATIENCE: largest number of all workers
together, otherwise.
"""
PILED = 1.4
"""Factor by which the time of the messages in transit grows with more steps, above which messages pile up."""
ALIKE = 0.1
"""Largest relative difference between the bytes that a surrogate and one of a quarter of its size send per step, as a
sign that either stands for the model.
"""


@dataclass(frozen=True)
class Conditions:
    """The machines and links of a rehearsal."""

    compute: ComputeModel
    """Durations of gradients."""
    network: Network
    work: Overheads = Overheads()
    """Costs of nodes in addition to gradients."""
    seed: int = 0


@dataclass(frozen=True)
class Rehearsal:
    """The result of a rehearsal (a run in virtual time without computation), in seconds and bytes per step. A step is
    one gradient of one worker.
    """

    seconds_per_step: float
    """Mean seconds between two gradients of a worker while all workers train, averaged over the workers."""
    steps_per_second: float
    """Gradients per second of all workers together; a fast worker contributes more gradients."""
    utilization: float
    """Share of the time in which a worker computes, from 0 to 1."""
    sent_bytes_per_step: float
    """Mean payload bytes that a worker sends per step."""
    server_sent_bytes_per_step: float
    """Payload bytes that the busiest server sends for each step of a worker; 0 without servers."""
    messages_per_step: float
    staleness: float | None
    """Mean staleness of updates in versions; None if the strategy counts no versions."""
    staleness_max: int | None
    steps: int
    """Number of steps that every worker took."""
    range: float
    """Half the width of the range of `seconds_per_step`, as a share of `seconds_per_step`: two standard errors."""
    batches: float
    """Mean number of batches for which one gradient is computed."""
    used: float
    """Share of the gradients that updates use; the other gradients are dropped or canceled."""
    held: float
    """Number of bytes of the state that the strategy keeps on a worker."""
    exposure: float | None
    """Share of the slowest worker's delay that all workers suffer; None if random delays do not show the share."""
    updates: bool
    """Whether any node recorded an update in the rehearsal."""
    bytes_between_parts: float
    """Mean payload bytes per step that a worker sends to the other workers of its replica, if replicas are split."""


def rehearse(
    task: JobProfile,
    strategy: Strategy,
    workers: int,
    at: Conditions,
    *,
    steps: int | None = None,
    split: SplitShape | None = None,
    listen: Callable[[Event], None] | None = None,
) -> Rehearsal:
    """Run `strategy` in virtual time on a surrogate for the model of a task.

    Args:
        task: the job, with the shapes of its tensors, on which codecs and buckets depend.
        strategy: the strategy to rehearse.
        workers: number of workers.
        at: the machines and links.
        steps: number of steps; None to continue, by whole periods of the strategy, until the range is narrow.
        split: how the workers split each replica; every worker of a replica then counts a step for its gradient. None
            if every worker holds a whole replica.
        listen: function that is called with every event; bytes in events are bytes of the surrogate.

    Raises:
        ConfigurationError: the strategy cannot run with this number of workers.
        Unrehearsed: no surrogate can replace the model, or the strategy sent nothing although it should have sent
            messages.
    """
    stage = _Stage(task, strategy, workers, at, split, listen)
    strategy.check(stage.replicas)
    if steps is not None and steps < 2:
        raise ConfigurationError(f"a rehearsal needs >= 2 steps, got {steps}; {STEPS} is usual")
    if task.optimizer is not None:
        require_steppable(strategy, task.optimizer)
    whole, small = elements_in(stage.shapes), ELEMENTS if split is None else split.elements(ELEMENTS)
    if whole <= small or (workers * whole <= SMALL and stage.first(small) <= LARGE / (workers * whole)):
        return _of_size(stage, whole, steps)
    try:
        if stage.by_shape:
            raise Shrunk("the messages depend on the shapes of matrices")
        few = min(2, stage.replicas)  # enough to compare the strategy's bytes
        try:
            strategy.check(few)
        except ConfigurationError:
            few = stage.replicas
        if steps is None and few > 1 and (why := _unlike(replace(task, tensors=stage.shapes), strategy, few)):
            raise Shrunk(why)
        return _of_size(stage, small, steps)
    except Shrunk as reason:
        # The model itself, for as many steps as that takes seconds and not minutes.
        most, least = int(LARGE / (workers**2 * whole)), max(6, longest_cycle(strategy, LONGEST))
        wanted = least if steps is None else steps
        if most < min(least, wanted):
            raise Unrehearsed(
                f"{strategy} cannot be rehearsed for {whole:,} elements on {workers} workers: {reason}; plan "
                "for a smaller model or fewer workers"
            ) from None
    return _of_size(stage, whole, min(wanted, most))


@dataclass(frozen=True)
class _Stage:
    """A rehearsal, except its number of steps and the size of its surrogate."""

    task: JobProfile
    strategy: Strategy
    workers: int
    at: Conditions
    split: SplitShape | None = None
    listen: Callable[[Event], None] | None = None

    @property
    def replicas(self) -> int:
        return self.workers if self.split is None else self.split.partition.replicas(self.workers)

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """Shapes of the model's tensors; those of a split model are ordered part by part."""
        return self.split.tensors if self.split is not None else self.task.tensors or ((self.task.elements,),)

    @property
    def by_shape(self) -> bool:
        """Whether the strategy's bytes depend on shapes that a surrogate of a matrix with a short side would lose."""
        codecs = [one for one in vars(self.strategy).values() if isinstance(one, Codec)]
        fitted = self.strategy.traits.matrices or any(one.bind_shapes(self.shapes) is not one for one in codecs)
        return fitted and any(len(shape) > 1 for shape in self.shapes)

    @property
    def sends(self) -> bool:
        """Whether the workers have anything to send to each other."""
        cell = self.strategy.taxonomy_entry
        return self.workers > 1 and (cell is None or (cell.exchange != "none" and cell.topology != "shared memory"))

    def longest(self, elements: int) -> int:
        """Largest number of steps of a rehearsal with a surrogate of `elements` parameters, even if nothing is sent."""
        return max(20, min(LONGEST, 4 * PATIENCE // self.workers, int(LARGE / (self.workers * elements))))

    def first(self, elements: int) -> int:
        """Number of steps of the first attempt to predict a mean."""
        longest = self.longest(elements)
        cycle = longest_cycle(self.strategy, longest)
        return _total(self.counted(cycle, longest), cycle)

    def counted(self, cycle: int, longest: int) -> int:
        """Number of steps that the first attempt counts: an even number of cycles."""
        least = max(BLOCKS, math.ceil(GRADIENTS / self.workers))
        return min(2 * cycle * math.ceil(least / (2 * cycle)), max(cycle, _shortened(longest, cycle)))

    def run(self, elements: int, steps: int) -> _RehearsedRun:
        """Run `steps` steps with a surrogate of about `elements` parameters."""
        task, at, replicas, shapes = self.task, self.at, self.replicas, shrunk(self.shapes, elements)
        if self.split is not None:
            batches = SurrogateBatches(task.batch)
        else:
            batches = task.surrogate_batches if self.strategy.traits.needs_job else SurrogateBatches()
        # An optimizer that only workers can step may not step a surrogate either.
        optimizer = None if task.optimizer is None else task.optimizer.on_servers
        engine = SurrogateEngine(shapes, task.nbytes, task.itemsize, batches, replicas, optimizer, at.seed)
        known = self.strategy if shapes == self.shapes else scaled(self.strategy, engine.factor)
        cluster, result = known.cluster(replicas), choose_result(known, None)
        parts = np.array_split(np.arange(engine.train_size), replicas)
        plan = Plan(known, cluster, engine.optimizer, parts, batches.batch, steps, at.seed, result, steps)
        drops = known.traits.server_optimizer and known.traits.delivery == "partial"
        work, events = at.work, list[Event]()
        compute = Longer(at.compute, work.step) if work.step else at.compute
        network = Handled(at.network, work.message, work.receive, work.serve, engine.factor, work.copy)
        simulation: Simulation | SplitSimulation
        if self.split is None:
            simulation = Simulation(engine, plan, compute, network, events.append)
        else:
            simulation = SplitSimulation(self.split.model(engine), plan, compute, network, events.append)
        with reporting_users_errors():
            simulation.run()
        if isinstance(simulation, SplitSimulation):
            groups, between_parts = simulation.groups, simulation.bytes_between_parts
        else:
            groups, between_parts = [simulation], 0
        states = [group.runners[rank].node.state for group in groups for rank in range(replicas)]
        steps_by_worker: list[list[StepEvent]] = [[] for _ in range(self.workers)]
        for event in events:
            if self.listen is not None:
                self.listen(event)
            if isinstance(event, StepEvent):
                steps_by_worker[event.rank].append(event)
        end = max(step.seconds for mine in steps_by_worker for step in mine)
        simulation.close()
        return _RehearsedRun(
            engine,
            events,
            steps_by_worker,
            dropping=cluster.servers if drops else 0,
            held=statistics.fmean(map(_bytes_in, states)),
            between_parts=between_parts,
            late=max(0.0, simulation.now - end),
        )


@dataclass(frozen=True)
class _RehearsedRun:
    """One run of a rehearsal, and what its events add up to."""

    engine: SurrogateEngine
    events: Sequence[Event]
    steps: Sequence[Sequence[StepEvent]]
    """The steps of each worker."""
    dropping: int
    """Number of servers that may drop gradients; 0 if none are dropped."""
    held: float
    """Mean number of bytes of a worker's state, in the surrogate."""
    between_parts: int
    """Bytes that all workers sent to other workers of their replicas, in the surrogate."""
    late: float
    """Seconds from the last step of any worker to the last message."""

    def counted(self, count: int, cycle: int) -> tuple[bool, list[Sequence[StepEvent]]]:
        """Return whether the workers keep up with each other, and the steps of each worker that count: the last
        `count`, in whole cycles if possible, without the beginning.

        If workers do not keep up with each other, their steps count only while all train, because the slow ones are
        then alone on the links; all steps count of a worker that has hardly begun by then.
        """
        whole = [mine for mine in self.steps if mine]
        end = min(mine[-1].seconds for mine in whole)
        together = [[step for step in mine if step.seconds <= end] for mine in whole]
        most = max(map(len, whole))
        abreast = most - min(map(len, together)) <= max(2, cycle, SURE * most)
        if not abreast:
            whole = [few if len(few) >= 4 else mine for few, mine in zip(together, whole, strict=True)]
        found = []
        for mine in whole:
            kept = count
            if len(mine) < _total(count, 1):
                kept = min(count, max(1, math.floor(len(mine) * (1 - LEFT_OUT))))
            found.append(mine[-(kept - kept % cycle if kept >= cycle else kept) :])
        return abreast, found

    def figures(self, counted: Sequence[Sequence[StepEvent]], cycle: int, steps: int) -> Rehearsal:
        """Return the means over the counted steps of each worker."""
        updates = [event for event in self.events if isinstance(event, UpdateEvent)]
        staleness = [update.staleness for update in updates if update.staleness is not None]
        nodes = [event for event in self.events if isinstance(event, NodeEvent)]
        periods = [statistics.fmean(map(_took, mine)) for mine in counted]
        busy = [statistics.fmean(step.compute_seconds for step in mine) for mine in counted]
        long = [mine for mine in counted if len(mine) >= cycle] or counted
        whole = [step for mine in long for step in mine]
        sent, factor, workers = statistics.fmean(map(_sent, whole)), self.engine.factor, len(self.steps)
        by_workers = sum(node.sent_bytes for node in nodes if node.node >= 0)
        by_server = max((node.sent_bytes for node in nodes if node.node < 0), default=0)
        late = staleness[int(LEFT_OUT * len(staleness)) :]
        gradients = sum(map(len, self.steps))
        return Rehearsal(
            statistics.fmean(periods),
            sum(1 / period for period in periods if period) if any(periods) else math.inf,
            sum(busy) / sum(periods) if any(periods) else 1.0,
            factor * sent,
            factor * sent * workers * by_server / by_workers if by_workers else 0.0,
            statistics.fmean(step.messages_sent for step in whole),
            statistics.fmean(late) if late else None,
            max(late, default=None),
            steps,
            range=0.0,
            batches=self.engine.batches,
            used=min(1.0, len(staleness) / (self.dropping * gradients)) if self.dropping else 1.0,
            held=factor * self.held,
            exposure=None,
            updates=bool(updates),
            bytes_between_parts=factor * self.between_parts / gradients,
        )


def _of_size(stage: _Stage, elements: int, steps: int | None) -> Rehearsal:
    """Rehearse with a surrogate of about `elements` parameters."""
    if steps is not None:
        run = stage.run(elements, steps)
        first = max(1, int(LEFT_OUT * max(step.step for mine in run.steps for step in mine)))
        after = [[step for step in mine if step.step > first] for mine in run.steps]
        return run.figures([mine for mine in after if mine], 1, steps)
    longest = stage.longest(elements)
    cycle = longest_cycle(stage.strategy, longest)
    count, late = stage.counted(cycle, longest), math.inf
    while True:
        steps = _total(count, cycle)
        run = stage.run(elements, steps)
        abreast, counted = run.counted(count, cycle)
        found = _with_means_of_law(run.figures(counted, cycle, steps), stage, counted, cycle, abreast)
        mean, error = _mean_and_error(_blocks(counted, cycle, _sent).mean(0))
        unsure = max(found.range / SURE, 2 * error / (SURE_OF_BYTES * mean) if mean else 0.0)
        silent = stage.sends and not found.sent_bytes_per_step and not found.server_sent_bytes_per_step
        cycles = min(map(len, counted)) // cycle
        # Messages that travel longer than the steps left out have not filled the links yet. Where they pile up, more
        # are in transit after more steps, and no number of steps is enough.
        filling = run.late > LEFT_OUT * steps * found.seconds_per_step and run.late <= PILED * late
        late = run.late
        untold = silent or filling or (not abreast and cycles < 2)
        # A standard error halves with four times the steps, so its square says how many more steps are needed.
        wanted = min(4.0, max(2.0 if untold else 1.0, unsure**2)) * count
        # Patience is for steps that differ. It does not end a rehearsal before there are blocks that could differ.
        few = cycles < (BLOCKS if unsure > 1 else 2)
        most = longest if silent or few or filling else min(longest, PATIENCE // stage.workers)
        more = min(cycle * math.ceil(wanted / cycle), _shortened(most, cycle))
        if more <= count:
            break
        count = more
    if silent:
        raise Unrehearsed(
            f"{stage.strategy} sent nothing in the {steps} steps of a rehearsal, which is the maximum; let workers "
            "exchange more often, or try the strategy with flockstep simulate"
        )
    return found


def _total(counted: int, cycle: int) -> int:
    """Total number of steps, such that the first counted step is the second after a multiple of `cycle`: its event is
    the first that tells of the waiting in a cycle, because it tells of the waiting before its gradient.
    """
    left_out = max(2, math.ceil(LEFT_OUT * counted))
    return counted + left_out + (1 - left_out) % cycle


def _shortened(total: int, cycle: int) -> int:
    """Largest number of steps, in whole cycles, that can be counted in a rehearsal of `total` steps."""
    return int(total / (1 + LEFT_OUT)) // cycle * cycle


def _with_means_of_law(
    found: Rehearsal, stage: _Stage, counted: Sequence[Sequence[StepEvent]], cycle: int, abreast: bool
) -> Rehearsal:
    """Return the rehearsal with the mean seconds of the compute model, instead of those of the rehearsal's few draws,
    and with the range of a step's seconds.

    What remains to be measured is how long workers wait. Waiting follows the slowest worker's delay, whose mean over
    many draws is known, too. The delay is therefore a control variate: a regression over blocks of steps shows its
    share in the time spent waiting, and only the rest of that time is uncertain.
    """
    law, extra = stage.at.compute, stage.at.work.step
    computing = [statistics.fmean(step.compute_seconds for step in mine) for mine in counted]
    waiting = [statistics.fmean(map(_waited, mine)) for mine in counted]
    draws, exposure, unsure = _draws(stage, counted), None, None
    if draws is None:
        blocks = _blocks(counted, cycle, _took)
    else:
        # A gradient takes longer than its draw if it is computed for several batches.
        computing = [
            (took - extra) / float(times[-len(mine) :].mean()) * mean_of(law, mine[0].rank) + extra
            for took, mine, times in zip(computing, counted, draws, strict=True)
        ]
        waited = _blocks(counted, cycle, _waited)
        blocks = waited + np.array(computing)[:, None]
        if abreast:
            added, unsure, exposure = _longer_waits(stage, waited.mean(0), draws, cycle)
            waiting = [max(0.0, seconds + added) for seconds in waiting]
        elif waited.mean() <= SURE * blocks.mean():
            exposure = 0.0
    periods = [one + other for one, other in zip(computing, waiting, strict=True)]
    seconds = statistics.fmean(periods)
    if not seconds:
        return found
    if abreast:
        rate = stage.workers / seconds
        width = (2 * _mean_and_error(blocks.mean(0))[1] if unsure is None else unsure) / seconds
    else:
        rate = sum(1 / period for period in periods)
        width = 2 * _mean_and_error((1 / blocks).sum(0))[1] / rate
    return replace(
        found,
        seconds_per_step=seconds,
        steps_per_second=rate,
        utilization=sum(computing) / sum(periods),
        range=width,
        exposure=exposure,
    )


def _draws(stage: _Stage, counted: Sequence[Sequence[StepEvent]]) -> list[Means] | None:
    """The durations that the compute model drew for the gradient before each worker's counted steps, and for theirs;
    None if gradients were canceled, or share cores, so that the model's mean is not the mean time of computing.
    """
    law = stage.at.compute
    if law.sharing is not None or not mean_of(law):
        return None
    found = []
    for mine in counted:
        draws = np.array(list(itertools.islice(law.stream(stage.at.seed, mine[0].rank), mine[-1].step)))
        draws = draws[max(0, mine[0].step - 2) :]
        took = (np.array([step.compute_seconds for step in mine]) - stage.at.work.step) / draws[-len(mine) :]
        if took.min() < (1 - 1e-6) * min(1.0, took.max()):
            return None
        found.append(draws)
    return found


def _longer_waits(stage: _Stage, waited: Means, draws: list[Means], cycle: int) -> tuple[float, float, float | None]:
    """Return the seconds by which workers wait longer in many steps than in the counted steps, the uncertainty of the
    waiting time, and the share of the slowest worker's delay that all workers suffer, None if it is unknown.
    """
    mean, error = _mean_and_error(waited)
    usual = late_of(stage.at.compute, stage.workers, cycle)
    cycles = (min(map(len, draws)) - 1) // cycle
    if not cycles:
        return 0.0, 2 * error + usual, None
    sums = np.array([times[: cycles * cycle].reshape(cycles, cycle).sum(1) for times in draws]) / cycle
    had = _in_blocks(sums.max(0) - sums.mean(0))
    apart = had - had.mean()
    off, square = usual - float(had.mean()), float(apart @ apart)
    if len(had) < BLOCKS or square <= (1e-6 * usual) ** 2:
        return 0.0, 2 * error + abs(off), None
    exposure = max(0.0, float(apart @ (waited - mean)) / square)
    rest = waited - mean - exposure * apart
    error = math.sqrt(float(rest @ rest) / (len(had) - 2) * (1 / len(had) + off**2 / square))
    return exposure * off, 2 * error, exposure


def _blocks(counted: Sequence[Sequence[StepEvent]], cycle: int, measure: Callable[[StepEvent], float]) -> Means:
    """Means of a measure for each worker (rows) in up to `BLOCKS` successive blocks of whole cycles (columns)."""
    cycles = min(map(len, counted)) // cycle
    rows = []
    for mine in counted:
        values = np.array(list(map(measure, mine)))
        if cycles:
            values = _in_blocks(values[: len(values) // cycle * cycle].reshape(-1, cycle).mean(1), cycles)
        else:
            values = values.mean(keepdims=True)
        rows.append(values)
    return np.array(rows)


def _in_blocks(values: Means, most: int = BLOCKS) -> Means:
    """Means of up to `BLOCKS` successive blocks of values."""
    return np.array([part.mean() for part in np.array_split(values, min(BLOCKS, most, len(values)))])


def _mean_and_error(blocks: Means) -> tuple[float, float]:
    """Mean of the blocks and its standard error; a single block does not show an error."""
    error = float(blocks.std(ddof=1)) / math.sqrt(len(blocks)) if len(blocks) > 1 else 0.0
    return float(blocks.mean()), error


def _took(step: StepEvent) -> float:
    return step.compute_seconds + step.wait_seconds + step.comm_seconds


def _waited(step: StepEvent) -> float:
    return step.wait_seconds + step.comm_seconds


def _sent(step: StepEvent) -> float:
    return step.sent_bytes


def _bytes_in(state: Any) -> int:
    """Bytes of all arrays in a state."""
    if isinstance(state, np.ndarray):
        return state.nbytes
    if isinstance(state, Mapping):
        return sum(map(_bytes_in, state.values()))
    if isinstance(state, (list, tuple)):
        return sum(map(_bytes_in, state))
    fields = dataclasses.fields(state) if dataclasses.is_dataclass(state) else ()
    return sum(_bytes_in(getattr(state, one.name)) for one in fields)


@lru_cache(maxsize=512)
def _unlike(task: JobProfile, strategy: Strategy, workers: int) -> str | None:
    """Reason why a surrogate is unreliable: a smaller one sends a different share of its bytes; None if it does not."""
    stage = _Stage(task, strategy, workers, Conditions(ConstantTime(1.0), Ideal()))
    sizes = (ELEMENTS, ELEMENTS // 4)
    try:
        # Few steps tell enough of a strategy that sends in each of them.
        for steps in (4, stage.first(ELEMENTS)) if strategy.traits.fixed_steps else (stage.first(ELEMENTS),):
            large, small = (_of_size(stage, size, steps) for size in sizes)
            if large.sent_bytes_per_step:
                break
    except Shrunk as why:
        return str(why)
    for name in ("sent_bytes_per_step", "messages_per_step"):
        one, other = getattr(large, name), getattr(small, name)
        if abs(one - other) > ALIKE * max(one, other):
            return (
                f"the strategy sends a different share of a model of {sizes[0]:,} elements than of a model of "
                f"{sizes[1]:,}, so a small model cannot stand for the real model"
            )
    return None
