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
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from flockstep.codecs.base import Codec, Shape
from flockstep.drivers.plan import Plan, require_steppable
from flockstep.drivers.runner import reporting_users_errors
from flockstep.drivers.virtual import Simulation
from flockstep.drivers.virtual_split import SplitSimulation
from flockstep.errors import ConfigurationError
from flockstep.optimizers.base import Optimizer
from flockstep.planning.split_shape import SplitShape
from flockstep.planning.surrogate import (
    Shrunk,
    SurrogateBatches,
    SurrogateEngine,
    Unrehearsed,
    longest_cycle,
    scaled,
    shrunk,
)
from flockstep.records.events import Event, NodeEvent, StepEvent, UpdateEvent
from flockstep.simulation.compute import ComputeModel, ConstantTime
from flockstep.simulation.handling import Handled, Longer, Overheads
from flockstep.simulation.law import late_of, mean_of
from flockstep.simulation.network import Ideal, Network
from flockstep.strategies.base import Strategy, choose_result

Means = np.ndarray[Any, np.dtype[np.float64]]
ELEMENTS = 4096
"""Number of parameters of the surrogate that replaces a large model."""
SMALL = 60_000
"""Product of parameters and workers up to which a rehearsal always uses the model itself, not a smaller surrogate."""
LARGE = 5e7
"""Product of the parameters of a worker, the steps and the pairs of workers, up to which a rehearsal may use the model
itself.
"""
WORK = 4e8
"""Largest product of parameters and steps, over all workers together, in a rehearsal."""
STEPS = 40
"""Default number of steps of a rehearsal whose length is fixed."""
LEFT_OUT = 0.25
"""Share of a rehearsal's steps, at the beginning, that is not counted, because a pipeline must first fill."""
FEW, GRADIENTS = 4, 48
"""Smallest number of counted steps of a rehearsal: FEW of each worker, and GRADIENTS of all workers together."""
MOST, ALL, PATIENCE = 640, 4096, 1024
"""Largest number of steps of a rehearsal: PATIENCE of all workers together. While nothing was sent or messages are
still in transit, MOST of each worker and ALL of all workers together.
"""
SURE, SURE_OF_BYTES = 0.05, 0.15
"""Ranges of the seconds (SURE) and of the bytes (SURE_OF_BYTES) of a step, as shares of their means, at which a
rehearsal ends. A range is twice the standard error of the mean.
"""
BLOCKS = 8
"""Number of blocks of steps from which the standard error of a mean is computed; fewer if the steps have fewer cycles.
"""
GROWS = 1.4
"""Factor by which delays grow with twice the steps, above which messages are assumed to accumulate, so that they are
still in transit after any number of steps.
"""
CLOSE = 1e-6
"""Relative difference between durations that counts as rounding."""
ALIKE = 0.1
"""Largest accepted relative difference between the bytes per step predicted with a surrogate and with a surrogate a
quarter as large.
"""


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
    steps: int = STEPS
    """Number of steps that every worker took."""
    range: float = 0.0
    """Half the width of the range of `seconds_per_step`, as a share of `seconds_per_step`: two standard errors."""
    batches: float = 1.0
    """Mean number of batches for which one gradient is computed."""
    workers: int = 1
    used: float = 1.0
    """Share of the gradients that updates use; the other gradients are dropped or canceled."""
    held: float = 0.0
    """Number of bytes of the state that the strategy keeps on a worker."""
    exposure: float | None = None
    """Share of the slowest worker's delay that all workers suffer; None if random delays do not show the share."""
    updates: bool = True
    """Whether any node recorded an update in the rehearsal."""
    bytes_between_parts: float = 0.0
    """Mean payload bytes per step that a worker sends to the other workers of its replica, if replicas are split."""

    @property
    def computing(self) -> float:
        """Seconds of a step during which a worker computes or waits for a core."""
        return self.utilization * self.seconds_per_step


@dataclass
class _Counts:
    """The events of a run that a rehearsal uses."""

    workers: int
    steps: list[StepEvent] = field(default_factory=list)
    nodes: list[NodeEvent] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    late: float = 0.0
    """Seconds from the last step of any worker to the last message."""
    held: float = 0.0
    """Bytes of a worker's state at the end."""
    servers: int = 0
    """Number of servers that may drop gradients; 0 if none are dropped."""
    updates: bool = False
    """Whether any node recorded an update."""
    between_parts: int = 0
    """Bytes that the workers of split replicas sent to the other workers of their replicas."""

    @property
    def used(self) -> float:
        """Share of the gradients that servers applied."""
        return min(1.0, len(self.staleness) / (self.servers * len(self.steps))) if self.servers else 1.0

    def take(self, event: Event) -> None:
        """Store what the figures of the rehearsal need of an event of its record."""
        if isinstance(event, StepEvent):
            self.steps.append(event)
        elif isinstance(event, NodeEvent):
            self.nodes.append(event)
        elif isinstance(event, UpdateEvent):
            self.updates = True
            if event.staleness is not None:
                self.staleness.append(event.staleness)

    def by_worker(self) -> list[list[StepEvent]]:
        """The steps of each worker, in order."""
        found: list[list[StepEvent]] = [[] for _ in range(self.workers)]
        for step in self.steps:
            found[step.rank].append(step)
        return [mine for mine in found if mine]


def _nothing(event: Event) -> None:
    """Event listener that does nothing."""


@dataclass(frozen=True)
class _Stage:
    """The settings of a rehearsal, except its number of steps and the size of its surrogate."""

    strategy: Strategy
    workers: int
    model_bytes: float
    compute: ComputeModel
    network: Network
    shapes: tuple[Shape, ...]
    surrogate_batches: SurrogateBatches
    dtype_bytes: int = 4
    optimizer: Optimizer | None = None
    seed: int = 0
    work: Overheads = Overheads()
    listen: Callable[[Event], None] = _nothing
    split: SplitShape | None = None

    @property
    def replicas(self) -> int:
        """Number of replicas of the model, each of which one worker, or the workers of a split model, hold."""
        return self.workers if self.split is None else self.split.partition.replicas(self.workers)

    @property
    def small(self) -> int:
        """Number of parameters of the surrogate for a large model."""
        return ELEMENTS if self.split is None else self.split.elements(ELEMENTS)

    @property
    def elements(self) -> int:
        """Number of the model's parameters."""
        return sum(map(math.prod, self.shapes))

    def longest(self, elements: int) -> int:
        """Largest number of steps of a rehearsal with a surrogate of `elements` parameters."""
        return max(20, min(MOST, ALL // self.workers, int(WORK / (self.workers * elements))))

    def run(self, elements: int, steps: int) -> tuple[_Counts, SurrogateEngine]:
        """Run `steps` steps with a surrogate of about `elements` parameters."""
        shapes = shrunk(self.shapes, elements)
        replicas = self.replicas
        engine = SurrogateEngine(
            shapes, self.model_bytes, self.dtype_bytes, self.surrogate_batches, replicas, self.optimizer, self.seed
        )
        known = self.strategy if shapes == self.shapes else scaled(self.strategy, engine.factor)
        cluster = known.cluster(replicas)
        parts = np.array_split(np.arange(engine.train_size), replicas)
        result = choose_result(known, None)
        plan = Plan(
            known, cluster, engine.optimizer, parts, self.surrogate_batches.batch, steps, self.seed, result, steps
        )
        traits = known.traits
        drops = traits.server_optimizer and traits.delivery == "partial"
        counts = _Counts(self.workers, servers=cluster.servers if drops else 0)

        def both(event: Event) -> None:
            counts.take(event)
            self.listen(event)

        compute = Longer(self.compute, self.work.step) if self.work.step else self.compute
        network = Handled(
            self.network, self.work.message, self.work.receive, self.work.serve, engine.factor, self.work.copy
        )
        simulation: Simulation | SplitSimulation
        if self.split is None:
            simulation = Simulation(engine, plan, compute, network, both)
        else:
            simulation = SplitSimulation(self.split.model(engine), plan, compute, network, both)
        with reporting_users_errors():
            simulation.run()
        if isinstance(simulation, SplitSimulation):
            groups, counts.between_parts = simulation.groups, simulation.bytes_between_parts
        else:
            groups = [simulation]
        states = [group.runners[rank].node.state for group in groups for rank in range(replicas)]
        counts.held = statistics.fmean(map(_bytes_in, states))
        counts.late = max(0.0, simulation.now - max(step.seconds for step in counts.steps))
        simulation.close()
        return counts, engine


def rehearse(
    strategy: Strategy,
    workers: int,
    model_bytes: float,
    compute: ComputeModel,
    network: Network,
    *,
    tensors: Sequence[int | Shape] = (),
    dtype_bytes: int = 4,
    optimizer: Optimizer | None = None,
    steps: int | None = None,
    seed: int = 0,
    surrogate_batches: SurrogateBatches | None = None,
    work: Overheads = Overheads(),  # noqa: B008
    listen: Callable[[Event], None] = _nothing,
    split: SplitShape | None = None,
) -> Rehearsal:
    """Run `strategy` in virtual time on a surrogate for a model of `model_bytes` bytes.

    Args:
        strategy: the strategy to rehearse.
        workers: number of workers.
        model_bytes: size of the model in bytes.
        compute: compute model of the gradients.
        network: network between the nodes.
        tensors: shapes of the model's tensors, or their numbers of elements, on which codecs and buckets depend; empty
            for one tensor.
        dtype_bytes: number of bytes of an element.
        optimizer: optimizer of the job; None for the default.
        steps: number of steps; None to continue, by whole periods of the strategy, until the range is narrow.
        seed: seed of the random draws.
        surrogate_batches: the known properties of the job's samples.
        work: costs of nodes in addition to gradients. listen: function that is called with every event; bytes in events
            are bytes of the surrogate.
        split: how the workers split each replica; `tensors` are then those of the split model, part by part, and every
            worker of a replica counts a step for its gradient. None if every worker holds a whole replica.

    Raises:
        ConfigurationError: the strategy cannot run with this number of workers.
        Unrehearsed: no surrogate can replace the model, or the strategy sent nothing although it should have sent
            messages.
    """
    strategy.check(workers if split is None else split.partition.replicas(workers))
    if steps is not None and steps < 2:
        raise ConfigurationError(f"a rehearsal needs >= 2 steps, got {steps}; {STEPS} is usual")
    if optimizer is not None:
        require_steppable(strategy, optimizer)
        optimizer = optimizer.on_servers  # an optimizer that only workers can step may not step a surrogate either
    shapes = tuple((one,) if isinstance(one, int) else tuple(one) for one in tensors)
    stage = _Stage(
        strategy,
        workers,
        model_bytes,
        compute,
        network,
        shapes or ((round(model_bytes / dtype_bytes),),),
        surrogate_batches or SurrogateBatches(),
        dtype_bytes,
        optimizer,
        seed,
        work,
        listen,
        split,
    )
    return _staged(stage, steps)


def _staged(stage: _Stage, steps: int | None) -> Rehearsal:
    """Rehearse the model itself if that is quick or no surrogate can replace it; otherwise a surrogate."""
    whole, workers, small = stage.elements, stage.workers, stage.small
    first = 2 if steps is None else steps
    least = max(FEW + 2, longest_cycle(stage.strategy, MOST))
    short = least if steps is None else steps
    if whole <= small or (workers * whole <= SMALL and _begun(stage, small, first) <= stage.longest(whole)):
        return _of_size(stage, whole, steps)
    try:
        if _by_shape(stage):
            raise Shrunk("the messages depend on the shapes of matrices")
        few = _few(stage.strategy, stage.replicas)
        if steps is None and few > 1 and (why := _unlike(stage.strategy, few, stage.shapes, stage.surrogate_batches)):
            raise Shrunk(why)
        return _of_size(stage, small, steps)
    except Shrunk as reason:
        most = int(LARGE / (workers**2 * whole))
        if most < min(least, short):
            raise Unrehearsed(
                f"{stage.strategy} cannot be rehearsed for {whole:,} elements on {workers} workers: {reason}; plan "
                "for a smaller model or fewer workers"
            ) from None
    return _of_size(stage, whole, min(short, most))


def _begun(stage: _Stage, elements: int, first: int) -> int:
    """Number of steps of the first attempt."""
    longest = stage.longest(elements)
    cycle = longest_cycle(stage.strategy, longest)
    return max(first, _aligned(stage, _counted(stage, cycle, longest), cycle))


def _of_size(stage: _Stage, elements: int, steps: int | None) -> Rehearsal:
    if steps is None:
        return _until_sure(stage, elements)
    counts, engine = stage.run(elements, steps)
    first = max(1, int(LEFT_OUT * max(step.step for step in counts.steps)))
    counted = [[step for step in mine if step.step > first] for mine in counts.by_worker()]
    found = _summary([mine for mine in counted if mine], counts, engine, 1, steps)
    every = sum(node.steps for node in counts.nodes if node.node >= 0) / stage.workers
    return replace(found, server_sent_bytes_per_step=engine.factor * _busiest(counts) / every)


def _until_sure(stage: _Stage, elements: int) -> Rehearsal:
    """Rehearse with more and more steps, until the ranges of their means are narrow and something was sent."""
    longest = stage.longest(elements)
    cycle = longest_cycle(stage.strategy, longest)
    count = _counted(stage, cycle, longest)
    late = dict[int, float]()
    while True:
        steps = _aligned(stage, count, cycle)
        counts, engine = stage.run(elements, steps)
        late[steps] = counts.late
        abreast, every = _together(counts.by_worker(), cycle)
        counted = [_whole(mine, count, cycle) for mine in every]
        found = _summary(counted, counts, engine, cycle, steps)
        silent = not found.sent_bytes_per_step and not found.server_sent_bytes_per_step and _sends(stage)
        early = _filling(late, max(map(_period, counted)))
        found = _with_means_of_law(found, stage, counted, cycle, abreast)
        mean, error = _mean_and_error(_blocks(counted, cycle, _sent).mean(0))
        unsure = max(found.range / SURE, 2 * error / (SURE_OF_BYTES * mean) if mean else 0.0)
        cycles = min(map(len, counted)) // cycle
        incomplete = silent or early or (not abreast and cycles < 2)
        # A standard error halves with four times the steps, so its square says how many more steps are needed.
        wanted = count * max(2.0 if incomplete else 1.0, unsure**2)
        few = cycles < (BLOCKS if unsure > 1 else 2)
        most = longest if silent or few else min(longest, MOST if early else PATIENCE // stage.workers)
        more = min(cycle * math.ceil(min(wanted, 4 * count) / cycle), _shortened(most, cycle))
        if more <= count:
            break
        count = more
    if silent:
        raise Unrehearsed(
            f"{stage.strategy} sent nothing in the {steps} steps of a rehearsal, which is the maximum; let workers "
            "exchange more often, or try the strategy with flockstep simulate"
        )
    return found


def _filling(late: dict[int, float], period: float) -> bool:
    """Whether messages may be in transit for longer than the ignored steps last, without piling up."""
    lengths = sorted(late)[-2:]
    grows = len(lengths) == 2 and late[lengths[1]] > GROWS * late[lengths[0]]
    return not grows and late[lengths[-1]] > LEFT_OUT * period * lengths[-1]


def _counted(stage: _Stage, cycle: int, longest: int) -> int:
    """Number of steps that the first attempt counts: an even number of cycles."""
    least = max(BLOCKS, math.ceil(GRADIENTS / stage.workers))
    return min(2 * cycle * math.ceil(least / (2 * cycle)), max(cycle, _shortened(longest, cycle)))


def _length(counted: int) -> int:
    """Total number of steps."""
    return counted + max(2, math.ceil(LEFT_OUT * counted))


def _aligned(stage: _Stage, counted: int, cycle: int) -> int:
    """Total number of steps, such that the first counted step is the second after a multiple of `cycle`: its event is
    the first that tells of the waiting in a cycle, because it tells of the waiting before its gradient.
    """
    left_out = _length(counted) - counted
    return counted + left_out + (1 - left_out) % cycle


def _shortened(total: int, cycle: int) -> int:
    """Largest number of steps, in whole cycles, that can be counted in a rehearsal of `total` steps."""
    return int(total / (1 + LEFT_OUT)) // cycle * cycle


def _together(steps: list[list[StepEvent]], cycle: int) -> tuple[bool, list[list[StepEvent]]]:
    """Whether workers keep up with each other; if not, the steps that they took while all trained.

    All steps count of a worker that has hardly begun by then.
    """
    end = min(mine[-1].seconds for mine in steps)
    found = [[step for step in mine if step.seconds <= end] for mine in steps]
    most = max(map(len, steps))
    if most - min(map(len, found)) <= max(2, cycle, SURE * most):
        return True, steps
    return False, [few if len(few) >= FEW else mine for few, mine in zip(found, steps, strict=True)]


def _whole(steps: list[StepEvent], count: int, cycle: int) -> list[StepEvent]:
    """The last `count` steps, in whole cycles if possible, without the beginning."""
    kept = count if len(steps) >= _length(count) else min(count, max(1, math.floor(len(steps) * (1 - LEFT_OUT))))
    return steps[-(kept - kept % cycle if kept >= cycle else kept) :]


def _sends(stage: _Stage) -> bool:
    """Whether the workers have anything to send to each other."""
    cell = stage.strategy.taxonomy_entry
    return stage.workers > 1 and (cell is None or (cell.exchange != "none" and cell.topology != "shared memory"))


def _with_means_of_law(
    found: Rehearsal, stage: _Stage, counted: list[list[StepEvent]], cycle: int, abreast: bool
) -> Rehearsal:
    """Return the rehearsal with the mean seconds of the compute model, instead of those of the rehearsal's few draws,
    and with the range of a step's seconds.

    What remains to be measured is how long workers wait. Waiting follows the slowest worker's delay, whose mean over
    many draws is known, too. The delay is therefore a control variate: a regression over blocks of steps shows its
    share in the time spent waiting, and only the rest of that time is uncertain.
    """
    draws = _draws(stage, counted)
    added, exposure = 0.0, None
    if draws is None:
        computing = [statistics.fmean(step.compute_seconds for step in mine) for mine in counted]
        periods = [_period(mine) for mine in counted]
        blocks = _blocks(counted, cycle, _took)
    else:
        computing = []
        for mine, times in zip(counted, draws, strict=True):
            took = statistics.fmean(step.compute_seconds for step in mine) - stage.work.step
            longer = took / float(times[-len(mine) :].mean())  # than the draws, as for several batches
            computing.append(longer * mean_of(stage.compute, mine[0].rank) + stage.work.step)
        waited = _blocks(counted, cycle, _waited)
        if abreast:
            added, unsure, exposure = _longer_waits(stage, waited.mean(0), draws, cycle)
        periods = [
            seconds + max(0.0, statistics.fmean(map(_waited, mine)) + added)
            for seconds, mine in zip(computing, counted, strict=True)
        ]
        blocks = waited + np.array(computing)[:, None]
        if not abreast and waited.mean() <= SURE * blocks.mean():
            exposure = 0.0
    seconds = statistics.fmean(periods)
    if not seconds:
        return found
    if not abreast:
        rate = sum(1 / period for period in periods)
        unsure = 2 * _mean_and_error((1 / blocks).sum(0))[1] / rate
    else:
        rate = stage.workers / seconds
        unsure = (2 * _mean_and_error(blocks.mean(0))[1] if draws is None else unsure) / seconds
    return replace(
        found,
        seconds_per_step=seconds,
        steps_per_second=rate,
        utilization=sum(computing) / sum(periods),
        range=unsure,
        exposure=exposure,
    )


def _draws(stage: _Stage, counted: list[list[StepEvent]]) -> list[Means] | None:
    """The durations that the compute model drew for the gradient before each worker's counted steps, and for theirs;
    None if gradients were canceled, or share cores, so that the model's mean is not the mean time of computing.
    """
    if stage.compute.sharing is not None or not mean_of(stage.compute):
        return None
    found = []
    for mine in counted:
        draws = np.array(list(itertools.islice(stage.compute.stream(stage.seed, mine[0].rank), mine[-1].step)))
        draws = draws[max(0, mine[0].step - 2) :]
        took = (np.array([step.compute_seconds for step in mine]) - stage.work.step) / draws[-len(mine) :]
        if took.min() < (1 - CLOSE) * min(1.0, took.max()):
            return None
        found.append(draws)
    return found


def _longer_waits(stage: _Stage, waited: Means, draws: list[Means], cycle: int) -> tuple[float, float, float | None]:
    """Return the seconds by which workers wait longer in many steps than in the counted steps, the uncertainty of the
    waiting time, and the share of the slowest worker's delay that all workers suffer, None if it is unknown.
    """
    mean, error = _mean_and_error(waited)
    usual = late_of(stage.compute, stage.workers, cycle)
    cycles = (min(map(len, draws)) - 1) // cycle
    if not cycles:
        return 0.0, 2 * error + usual, None
    sums = np.array([times[: cycles * cycle].reshape(cycles, cycle).sum(1) for times in draws]) / cycle
    had = _in_blocks(sums.max(0) - sums.mean(0))
    off, square = usual - float(had.mean()), float(((had - had.mean()) ** 2).sum())
    if len(had) < BLOCKS or square <= (CLOSE * usual) ** 2:
        return 0.0, 2 * error + abs(off), None
    exposure = max(0.0, float((had - had.mean()) @ (waited - mean)) / square)
    rest = waited - mean - exposure * (had - had.mean())
    error = math.sqrt(float(rest @ rest) / (len(had) - 2) * (1 / len(had) + off**2 / square))
    return exposure * off, 2 * error, exposure


def _blocks(counted: list[list[StepEvent]], cycle: int, measure: Callable[[StepEvent], float]) -> Means:
    """Means of a measure for each worker (rows) in up to `BLOCKS` successive blocks of whole cycles (columns)."""
    cycles = min(map(len, counted)) // cycle
    of_each = [np.array(list(map(measure, mine))) for mine in counted]
    if not cycles:
        return np.array([[values.mean()] for values in of_each])
    return np.array([
        _in_blocks(values[: len(values) // cycle * cycle].reshape(-1, cycle).mean(1), cycles) for values in of_each
    ])  # fmt: skip


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


def _period(steps: list[StepEvent]) -> float:
    return statistics.fmean(map(_took, steps))


def _sent(step: StepEvent) -> float:
    return step.sent_bytes


def _busiest(counts: _Counts) -> int:
    """Bytes that the busiest server sent."""
    return max((node.sent_bytes for node in counts.nodes if node.node < 0), default=0)


def _summary(
    counted: list[list[StepEvent]], counts: _Counts, engine: SurrogateEngine, cycle: int, steps: int
) -> Rehearsal:
    """The result of a rehearsal; `counted`: the counted steps of each worker."""
    periods = [_period(mine) for mine in counted]
    busy = [statistics.fmean(step.compute_seconds for step in mine) for mine in counted]
    whole = [step for mine in counted if len(mine) >= cycle for step in mine] or [s for mine in counted for s in mine]
    sent = statistics.fmean(map(_sent, whole))
    every = sum(node.sent_bytes for node in counts.nodes if node.node >= 0)
    late = counts.staleness[int(LEFT_OUT * len(counts.staleness)) :]
    return Rehearsal(
        statistics.fmean(periods),
        sum(1 / period for period in periods if period) if any(periods) else math.inf,
        sum(busy) / sum(periods) if any(periods) else 1.0,
        engine.factor * sent,
        engine.factor * sent * counts.workers * _busiest(counts) / every if every else 0.0,
        statistics.fmean(step.messages_sent for step in whole),
        statistics.fmean(late) if late else None,
        max(late, default=None),
        steps,
        batches=engine.batches,
        workers=counts.workers,
        used=counts.used,
        held=engine.factor * counts.held,
        updates=counts.updates,
        bytes_between_parts=engine.factor * counts.between_parts / len(counts.steps),
    )


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
def _unlike(
    strategy: Strategy, workers: int, shapes: tuple[Shape, ...], surrogate_batches: SurrogateBatches
) -> str | None:
    """Reason why a surrogate is unreliable: a smaller one sends a different share of its bytes; None if it does not."""
    nbytes = 4 * sum(map(math.prod, shapes))
    stage = _Stage(strategy, workers, nbytes, ConstantTime(1.0), Ideal(), shapes, surrogate_batches)
    try:
        begun = _begun(stage, ELEMENTS, 2)
        for steps in (FEW, begun) if strategy.traits.fixed_steps else (begun,):  # of those that send seldom, more
            large, small = (_of_size(stage, size, steps) for size in (ELEMENTS, ELEMENTS // 4))
            if large.sent_bytes_per_step:
                break
    except Shrunk as why:
        return str(why)
    for name in ("sent_bytes_per_step", "messages_per_step"):
        one, other = getattr(large, name), getattr(small, name)
        if abs(one - other) > ALIKE * max(one, other):
            return (
                f"the strategy sends a different share of a model of {ELEMENTS:,} elements than of a model of "
                f"{ELEMENTS // 4:,}, so a small model cannot stand for the real model"
            )
    return None


def _by_shape(stage: _Stage) -> bool:
    """Whether the strategy's bytes depend on shapes that a surrogate of a matrix with a short side would lose."""
    codecs = [one for one in vars(stage.strategy).values() if isinstance(one, Codec)]
    fitted = stage.strategy.traits.matrices or any(one.bind_shapes(stage.shapes) is not one for one in codecs)
    return fitted and any(len(shape) > 1 for shape in stage.shapes)


def _few(strategy: Strategy, workers: int) -> int:
    """Two workers if the strategy can run on two, which is enough to compare its bytes."""
    try:
        strategy.check(2)
    except ConfigurationError:
        return workers
    return min(2, workers)
