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

ELEMENTS = 4096
"""Number of parameters of the surrogate that replaces a large model."""
SMALL = 60_000
"""Product of parameters and workers up to which a rehearsal always uses the model itself, not a smaller surrogate."""
LARGE = 5e7
"""Product of the parameters of a worker, the steps and the pairs of workers, up to which a rehearsal may use the model
itself.
"""
QUICK = 1e6
"""Product of the parameters of a worker, the steps and the pairs of workers, up to which a quick rehearsal uses the
model itself.
"""
WORK = 4e8
"""Largest product of parameters and steps, over all workers together, in a rehearsal."""
STEPS = 40
"""Default number of steps of a rehearsal whose length is fixed."""
LEFT_OUT = 0.25
"""Share of a rehearsal's steps, at the beginning, that is not counted, because a pipeline must first fill."""
FEWEST, EVERYONES = 16, 48
"""Smallest number of steps that a rehearsal counts: FEWEST of each worker, or EVERYONES of all workers together,
whichever is reached first.
"""
LITTLE, MOST_RANDOM = 0.25, 3.0
"""LITTLE: largest delay of the slowest worker, as a share of a step, for which a rehearsal counts only `FEWEST` steps.

MOST_RANDOM: largest factor by which random delays increase the number of counted steps.
"""
MOST, ALL, PATIENCE = 640, 20480, 1024
"""Largest number of steps of a rehearsal: MOST of each worker, ALL of all workers together, and PATIENCE of all workers
together while the two halves of the rehearsal still differ.
"""
FEW = 4
"""Smallest number of steps of a rehearsal that the slowest worker must take while all workers train."""
AGREE, BYTES = 0.05, 0.15
"""Largest relative differences between the two halves of a rehearsal at which the halves agree: in seconds (AGREE) and
in bytes (BYTES).
"""
GROWS = 1.4
"""Factor by which delays grow with twice the steps, above which messages are assumed to accumulate, so that further
steps would not make the two halves of a rehearsal agree.
"""
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
    settled: bool = True
    """Whether the two halves of the rehearsal agree in seconds and bytes per step."""
    batches: float = 1.0
    """Mean number of batches for which one gradient is computed."""
    workers: int = 1
    used: float = 1.0
    """Share of the gradients that updates use; the other gradients are dropped or canceled."""
    held: float = 0.0
    """Number of bytes of the state that the strategy keeps on a worker."""
    spread: float = 1.0
    """Ratio between the step times of the two halves of the rehearsal, at least 1."""
    updates: bool = True
    """Whether any node recorded an update in the rehearsal."""
    bytes_between_parts: float = 0.0
    """Mean payload bytes per step that a worker sends to the other workers of its replica, if replicas are split."""

    @property
    def computing(self) -> float:
        """Seconds of a step during which a worker computes or waits for a core."""
        return self.utilization * self.seconds_per_step

    @property
    def unevenness(self) -> float:
        """Number of gradients of all workers, divided by the number that would follow from the mean step time; at least
        1.
        """
        return self.steps_per_second * self.seconds_per_step / self.workers if self.seconds_per_step else 1.0


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
    quick: bool = False
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
    quick: bool = False,
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
        steps: number of steps; None to continue, by whole periods of the strategy, until both halves agree. quick: use
            a surrogate even for a small model.
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
        quick,
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
    if whole <= small or (
        not stage.quick and workers * whole <= SMALL and _begun(stage, small, first) <= stage.longest(whole)
    ):
        return _of_size(stage, whole, steps)
    try:
        if _by_shape(stage):
            raise Shrunk("the messages depend on the shapes of matrices")
        few = _few(stage.strategy, stage.replicas)
        if steps is None and few > 1 and (why := _unlike(stage.strategy, few, stage.shapes, stage.surrogate_batches)):
            raise Shrunk(why)
        return _of_size(stage, small, steps)
    except Shrunk as reason:
        most = int((QUICK if stage.quick else LARGE) / (workers**2 * whole))
        if most < min(least, short):
            raise Unrehearsed(
                f"{stage.strategy} cannot be rehearsed for {whole:,} elements on {workers} workers: {reason}; plan "
                "for a smaller model or fewer workers"
            ) from None
    return _of_size(stage, whole, min(short, most))


def _begun(stage: _Stage, elements: int, first: int) -> int:
    """Number of steps of the first attempt, which suffices if a step takes no longer than its gradient."""
    longest = stage.longest(elements)
    cycle, step = longest_cycle(stage.strategy, longest), mean_of(stage.compute)
    return max(first, _length(_counted(stage, cycle, longest, _random(stage, step))))


def _of_size(stage: _Stage, elements: int, steps: int | None) -> Rehearsal:
    if steps is None:
        return _until_settled(stage, elements)
    counts, engine = stage.run(elements, steps)
    first = max(1, int(LEFT_OUT * max(step.step for step in counts.steps)))
    counted = [[step for step in mine if step.step > first] for mine in counts.by_worker()]
    found = _summary([mine for mine in counted if mine], counts, engine, 1, steps)
    every = sum(node.steps for node in counts.nodes if node.node >= 0) / stage.workers
    return replace(found, server_sent_bytes_per_step=engine.factor * _busiest(counts) / every)


def _until_settled(stage: _Stage, elements: int) -> Rehearsal:
    """Double the number of steps until random times are averaged, the halves agree and something was sent."""
    longest = stage.longest(elements)
    cycle = longest_cycle(stage.strategy, longest)
    count = _counted(stage, cycle, longest)
    late = dict[int, float]()
    while True:
        steps = _length(count)
        counts, engine = stage.run(elements, steps)
        late[steps] = counts.late
        abreast, every = _together(counts.by_worker(), cycle)
        counted = [_whole(mine, count, cycle) for mine in every]
        found = _summary(counted, counts, engine, cycle, steps)
        silent = not found.sent_bytes_per_step and not found.server_sent_bytes_per_step and _sends(stage)
        early = _filling(late, max(map(_period, counted)))
        least = max(_counted(stage, cycle, longest, _random(stage, found.seconds_per_step)), 0 if abreast else FEWEST)
        enough = count >= least and min(map(len, counted)) >= FEW
        settled = not silent and not early and enough and _agree(counted, cycle, _by_law(stage, counted))
        more = least if count < least else 2 * count
        most = longest if silent or count < least else _patience(stage, cycle, early)
        if settled or _length(more) > min(longest, most):
            break
        count = more
    if silent:
        raise Unrehearsed(
            f"{stage.strategy} sent nothing in the {steps} steps of a rehearsal, which is the maximum; let workers "
            "exchange more often, or try the strategy with flockstep simulate"
        )
    if abreast and found.seconds_per_step:
        found = replace(found, steps_per_second=stage.workers / found.seconds_per_step)
    return replace(found, settled=settled, spread=_spread(counted, cycle))


def _patience(stage: _Stage, cycle: int, early: bool) -> int:
    """Steps up to which a rehearsal continues because its halves differ, or because messages may be in transit.

    A quick rehearsal waits for such messages only as long as the strategy counts steps: a worker that does not wait
    for them by then never does.
    """
    usual = PATIENCE // stage.workers
    if not early:
        return usual // 4 if stage.quick else usual
    return max(usual // 4, _length(2 * cycle)) if stage.quick else MOST


def _filling(late: dict[int, float], period: float) -> bool:
    """Whether messages may be in transit for longer than the ignored steps last, without piling up."""
    lengths = sorted(late)[-2:]
    grows = len(lengths) == 2 and late[lengths[1]] > GROWS * late[lengths[0]]
    return not grows and late[lengths[-1]] > LEFT_OUT * period * lengths[-1]


def _random(stage: _Stage, step: float) -> float:
    """Factor on the number of counted steps if gradient times are random and a step takes `step` seconds."""
    late = late_of(stage.compute, stage.workers)
    return min(MOST_RANDOM, max(1.0, (late / step / LITTLE) ** 2)) if step else 1.0


def _counted(stage: _Stage, cycle: int, longest: int, random: float = 1.0) -> int:
    """Number of counted steps: an even number of cycles, or one long cycle, with the factor `random`."""
    least = random * min(FEWEST, max(FEW, EVERYONES // stage.workers))
    pairs = 2 * cycle * max(1, math.ceil(least / (2 * cycle)))
    if stage.quick and cycle >= least:
        return cycle
    return pairs if _length(pairs) <= longest else cycle * max(1, int(longest / (1 + LEFT_OUT)) // cycle)


def _length(counted: int) -> int:
    """Total number of steps."""
    return counted + max(2, math.ceil(LEFT_OUT * counted))


def _together(steps: list[list[StepEvent]], cycle: int) -> tuple[bool, list[list[StepEvent]]]:
    """Whether workers keep up with each other; if not, the steps that they took while all trained.

    All steps count of a worker that has hardly begun by then.
    """
    end = min(mine[-1].seconds for mine in steps)
    found = [[step for step in mine if step.seconds <= end] for mine in steps]
    most = max(map(len, steps))
    if most - min(map(len, found)) <= max(2, cycle, AGREE * most):
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


def _agree(counted: list[list[StepEvent]], cycle: int, by_law: bool) -> bool:
    """Whether both halves of all workers' steps took equally long and sent equally much; one cycle has no halves.

    If computing times follow a known compute model (`by_law`), differences between them are ignored.
    """
    took, sent = _halves(counted, cycle, _took), _halves(counted, cycle, _sent)
    compared = _halves(counted, cycle, _waited) if by_law else took
    return abs(compared[0] - compared[1]) <= AGREE * max(took) and abs(sent[0] - sent[1]) <= BYTES * max(sent)


def _by_law(stage: _Stage, counted: list[list[StepEvent]]) -> bool:
    """Whether each step computes one gradient to its end, with a core of its own."""
    if stage.compute.sharing is not None:
        return False
    close = 1e-6 * mean_of(stage.compute)
    for mine in counted:
        times = list(itertools.islice(stage.compute.stream(stage.seed, mine[0].rank), mine[-1].step))
        if any(abs(one.compute_seconds - times[one.step - 1] - stage.work.step) > close for one in mine):
            return False
    return True


def _halves(counted: list[list[StepEvent]], cycle: int, measure: Callable[[StepEvent], float]) -> tuple[float, float]:
    """Sum over the workers of the mean of a measure per step, in the first half and in the second half."""
    halves = [(mine[: len(mine) // 2], mine[len(mine) // 2 :]) for mine in counted if len(mine) >= 2 * cycle]
    first, second = (sum(statistics.fmean(map(measure, pair[i])) for pair in halves if all(pair)) for i in range(2))
    return first, second


def _spread(counted: list[list[StepEvent]], cycle: int) -> float:
    """Ratio of the step times of the two halves, at least 1."""
    took = _halves(counted, cycle, _took)
    return max(took) / min(took) if min(took) else math.inf if max(took) else 1.0


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
        True,
        engine.batches,
        counts.workers,
        counts.used,
        engine.factor * counts.held,
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
    stage = _Stage(strategy, workers, nbytes, ConstantTime(1.0), Ideal(), shapes, surrogate_batches, quick=True)
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
