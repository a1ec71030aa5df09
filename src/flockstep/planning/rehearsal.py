"""What a step of any strategy takes, from its own program run in virtual time with nothing to compute.

Only seconds and bytes are wanted, so that a model that is large is stood for by a small one, every byte of which counts
for many: the programs, their messages and their waiting are those of the real model, and so are the virtual seconds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from flockstep.codecs.base import Shape
from flockstep.drivers.plan import Plan
from flockstep.drivers.virtual import Simulation
from flockstep.errors import ConfigurationError
from flockstep.nodes import Cluster
from flockstep.optimizers.base import Optimizer
from flockstep.planning.stand_in import Heavy, Lessons, Shrunk, StandIn, Unrehearsed, longest_cycle, scaled, shrunk
from flockstep.records.events import Event, Node, Step, Update
from flockstep.simulation.compute import ComputeModel
from flockstep.simulation.network import Network
from flockstep.strategies.base import Strategy, choose_result

ELEMENTS = 8192
"""Parameters of the stand-in for a large model."""
SMALL, LARGE = 2_000_000, 40_000_000
"""Parameters of all workers up to which a model always stands for itself, and up to which it may have to."""
WORK = 4e8
"""Parameters of all workers times steps that a rehearsal may touch."""
STEPS = 40
"""Of a rehearsal that is told how many."""
LEFT_OUT = 0.25
"""Share of the steps at the beginning that do not count: a pipeline has to fill."""
FEWEST, MOST = 16, 640
"""Steps that count in the shortest rehearsal; all steps of the longest,"""
EVERYONES, PATIENCE = 20480, 4096
"""and all workers' steps; those up to which it goes on only because its halves differ."""
FEW = 4
"""Steps of the slowest worker while all train, at the least."""
AGREE = 0.05
"""Share by which the halves of a rehearsal may differ, in seconds and in bytes."""
GROWS = 1.4
"""How many times as late messages are after twice the steps if they pile up, or more."""
ALIKE = 0.1
"""Share by which what a stand-in sends may differ from what one of a quarter of its size does."""


@dataclass(frozen=True)
class Rehearsal:
    """What a run would be like. Seconds and bytes; a step is one gradient of one worker."""

    seconds_per_step: float
    """The time between two gradients of a worker, in the mean over the workers, while they all train."""
    steps_per_second: float
    """Gradients that all workers together compute, each at its own pace."""
    utilisation: float
    """Share of its time that a worker computes, from 0 to 1."""
    sent_per_step: float
    """Payload bytes that a worker sends, in the mean."""
    server_sent_per_step: float
    """Payload bytes that the busiest server sends for each step that a worker takes; 0 without servers."""
    messages_per_step: float
    staleness: float | None
    """Mean number of versions by which an update was late; None where nothing counts them."""
    staleness_max: int | None
    steps: int = STEPS
    """That every worker took."""
    settled: bool = True
    """Whether its halves agree."""
    batches: float = 1.0
    """How many batches of samples a gradient is over, in the mean."""
    piling: float = 0.0
    """Seconds for which links fall behind with every step, where nobody waits for messages; not in the others."""


@dataclass
class _Books:
    """What of a run's events matters here."""

    workers: int
    steps: list[Step] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    late: float = 0.0
    """Seconds from the last step of all to the last message."""

    def take(self, event: Event) -> None:
        """Keep an event."""
        if isinstance(event, Step):
            self.steps.append(event)
        elif isinstance(event, Node):
            self.nodes.append(event)
        elif isinstance(event, Update) and event.staleness is not None:
            self.staleness.append(event.staleness)

    def by_worker(self) -> list[list[Step]]:
        """Each worker's steps, in order."""
        found: list[list[Step]] = [[] for _ in range(self.workers)]
        for step in self.steps:
            found[step.rank].append(step)
        return [mine for mine in found if mine]


@dataclass(frozen=True)
class _Stage:
    """Everything of a rehearsal but the number of its steps and the size of its stand-in."""

    strategy: Strategy
    workers: int
    model_bytes: float
    compute: ComputeModel
    network: Network
    shapes: tuple[Shape, ...]
    dtype_bytes: int
    optimizer: Optimizer | None
    seed: int
    lessons: Lessons
    listen: Callable[[Event], None]

    @property
    def elements(self) -> int:
        """Of the model."""
        return sum(map(math.prod, self.shapes))

    def longest(self, elements: int) -> int:
        """Steps that a rehearsal with a stand-in of so many elements may have at the most."""
        return max(20, min(MOST, EVERYONES // self.workers, int(WORK / (self.workers * elements))))

    def run(self, elements: int, steps: int) -> tuple[_Books, StandIn]:
        """So many steps with a stand-in of about so many elements."""
        shapes = shrunk(self.shapes, elements)
        engine = StandIn(
            shapes, self.model_bytes, self.dtype_bytes, self.lessons, self.workers, self.optimizer, self.seed
        )
        known = self.strategy if shapes == self.shapes else scaled(self.strategy, engine.factor)
        cluster = Cluster(self.workers, known.servers_for(self.workers))
        parts = np.array_split(np.arange(engine.train_size), self.workers)
        result = choose_result(known, None)
        plan = Plan(known, cluster, engine.optimizer, parts, self.lessons.batch, steps, self.seed, result, steps)
        books = _Books(self.workers)

        def both(event: Event) -> None:
            books.take(event)
            self.listen(event)

        simulation = Simulation(engine, plan, self.compute, Heavy(self.network, engine.factor), both)
        simulation.run()
        books.late = max(0.0, simulation.now - max(step.t for step in books.steps))
        return books, engine


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
    small: int = SMALL,
    seed: int = 0,
    lessons: Lessons | None = None,
    listen: Callable[[Event], None] = lambda event: None,
) -> Rehearsal:
    """Run `strategy` in virtual time on a stand-in for a model of `model_bytes` bytes.

    `tensors` are the shapes of the model's tensors, or their sizes in elements (none: one tensor), which codecs and
    buckets look at; where all workers' together have no more than `small` elements the stand-in has those very shapes.
    `steps` None: as many as it takes for whole periods of what the strategy does, and for the first half to agree with
    the second. `listen` hears of every event, whose bytes are those of the stand-in.

    Raises:
        ConfigurationError: the strategy cannot run on so many workers.
        Unrehearsed: nothing small can stand for the model, or nothing was sent by a strategy that sends.
    """
    strategy.check(workers)
    if steps is not None and steps < 2:
        raise ConfigurationError(f"a rehearsal needs >= 2 steps, got {steps}; {STEPS} is usual")
    shapes = tuple((one,) if isinstance(one, int) else tuple(one) for one in tensors)
    stage = _Stage(
        strategy,
        workers,
        model_bytes,
        compute,
        network,
        shapes or ((round(model_bytes / dtype_bytes),),),
        dtype_bytes,
        optimizer,
        seed,
        lessons or Lessons(),
        listen,
    )
    return _staged(stage, steps, small)


def _staged(stage: _Stage, steps: int | None, small: int) -> Rehearsal:
    """With the model itself if that is quick, else with a stand-in, unless only the model itself will do."""
    whole, workers = stage.elements, stage.workers
    first = 2 if steps is None else steps
    if whole <= ELEMENTS or (workers * whole <= small and _begun(stage, ELEMENTS, first) <= stage.longest(whole)):
        return _of_size(stage, whole, steps)
    try:
        if steps is None:
            _require_alike(stage)
        return _of_size(stage, ELEMENTS, steps)
    except Shrunk as reason:
        if workers * whole > LARGE:
            raise Unrehearsed(
                f"{stage.strategy} cannot be rehearsed for {whole:,} elements on {workers} workers: {reason}; plan it "
                f"for a model of {LARGE // workers:,} elements or fewer"
            ) from None
    return _of_size(stage, whole, steps)


def _begun(stage: _Stage, elements: int, first: int) -> int:
    """Steps of the first attempt."""
    longest = stage.longest(elements)
    return max(first, _length(_counted(longest_cycle(stage.strategy, longest), longest)))


def _of_size(stage: _Stage, elements: int, steps: int | None) -> Rehearsal:
    if steps is None:
        return _until_settled(stage, elements)
    books, engine = stage.run(elements, steps)
    first = max(1, int(LEFT_OUT * max(step.step for step in books.steps)))
    counted = [[step for step in mine if step.step > first] for mine in books.by_worker()]
    found = _summary([mine for mine in counted if mine], books, engine, 1, steps)
    every = sum(node.steps for node in books.nodes if node.node >= 0) / stage.workers
    return replace(found, server_sent_per_step=engine.factor * _busiest(books) / every)


def _until_settled(stage: _Stage, elements: int) -> Rehearsal:
    """Twice as many steps until the halves agree and something was sent."""
    longest = stage.longest(elements)
    cycle = longest_cycle(stage.strategy, longest)
    count = _counted(cycle, longest)
    late = dict[int, float]()
    while True:
        steps = _length(count)
        books, engine = stage.run(elements, steps)
        late[steps] = books.late
        abreast, every = _together(books.by_worker(), cycle)
        counted = [_whole(mine, count, cycle) for mine in every]
        found = _summary(counted, books, engine, cycle, steps)
        silent = not found.sent_per_step and not found.server_sent_per_step and _sends(stage)
        early = _filling(late, max(map(_period, counted)))
        settled = not silent and not early and _agree(counted, cycle) and min(map(len, counted)) >= FEW
        most = longest if silent or early else min(longest, PATIENCE // stage.workers)
        if settled or _length(2 * count) > most:
            break
        count *= 2
    if silent:
        raise Unrehearsed(
            f"{stage.strategy} sent nothing in {steps} steps, and rehearsals have no more; let workers exchange more "
            "often, or try it with flockstep simulate"
        )
    if abreast and found.seconds_per_step:
        found = replace(found, steps_per_second=stage.workers / found.seconds_per_step)
    slowest = max(map(_period, counted))
    if len(late) == 1 and 2 * books.late > AGREE * slowest * steps:
        late[steps // 2] = stage.run(elements, steps // 2)[0].late
    return replace(found, settled=settled, piling=_piling(late, slowest))


def _filling(late: dict[int, float], period: float) -> bool:
    """Whether a message may be on its way for longer than the steps that are left out; later ones do not pile up."""
    lengths = sorted(late)[-2:]
    grows = len(lengths) == 2 and late[lengths[1]] > GROWS * late[lengths[0]]
    return not grows and late[lengths[-1]] > LEFT_OUT * period * lengths[-1]


def _piling(late: dict[int, float], period: float) -> float:
    """Seconds by which the last message is later with every step of the slowest worker, if that is much."""
    lengths = sorted(late)[-2:]
    if len(lengths) < 2:
        return 0.0
    by = (late[lengths[1]] - late[lengths[0]]) / (lengths[1] - lengths[0])
    return by if by > AGREE * period else 0.0


def _counted(cycle: int, longest: int) -> int:
    """Steps that are counted at first: an even number of cycles, or a single one that is long."""
    pairs = 2 * cycle * max(1, math.ceil(FEWEST / (2 * cycle)))
    return pairs if _length(pairs) <= longest else cycle * max(1, int(longest / (1 + LEFT_OUT)) // cycle)


def _length(counted: int) -> int:
    """Steps in all."""
    return counted + max(4, math.ceil(LEFT_OUT * counted))


def _together(steps: list[list[Step]], cycle: int) -> tuple[bool, list[list[Step]]]:
    """Whether workers keep abreast of each other, and if not, the steps that they took while all trained.

    Of a worker that has hardly begun by then, all.
    """
    end = min(mine[-1].t for mine in steps)
    found = [[step for step in mine if step.t <= end] for mine in steps]
    most = max(map(len, steps))
    if most - min(map(len, found)) <= max(2, cycle, AGREE * most):
        return True, steps
    return False, [few if len(few) >= FEW else mine for few, mine in zip(found, steps, strict=True)]


def _whole(steps: list[Step], count: int, cycle: int) -> list[Step]:
    """The last `count` of them, or as many cycles as there are after the beginning."""
    kept = min(count, max(1, math.floor(len(steps) * (1 - LEFT_OUT))))
    return steps[-(kept - kept % cycle if kept >= cycle else kept) :]


def _sends(stage: _Stage) -> bool:
    """Whether its workers have anything to send to each other."""
    cell = stage.strategy.cell
    return stage.workers > 1 and (cell is None or (cell.exchange != "none" and cell.topology != "shared memory"))


def _agree(counted: list[list[Step]], cycle: int) -> bool:
    """Whether both halves of every worker's steps took as long and sent as much; a single cycle has no halves."""
    halves = [(mine[: len(mine) // 2], mine[len(mine) // 2 :]) for mine in counted if len(mine) >= 2 * cycle]
    for measure in (_took, _sent):
        first, second = (sum(statistics.fmean(map(measure, pair[i])) for pair in halves if all(pair)) for i in range(2))
        if abs(first - second) > AGREE * max(first, second):
            return False
    return True


def _took(step: Step) -> float:
    return step.compute + step.wait + step.comm


def _period(steps: list[Step]) -> float:
    return statistics.fmean(map(_took, steps))


def _sent(step: Step) -> float:
    return step.sent


def _busiest(books: _Books) -> int:
    """Bytes that the busiest server sent."""
    return max((node.sent for node in books.nodes if node.node < 0), default=0)


def _summary(counted: list[list[Step]], books: _Books, engine: StandIn, cycle: int, steps: int) -> Rehearsal:
    """`counted`: of each worker, the steps that count."""
    periods = [_period(mine) for mine in counted]
    busy = [statistics.fmean(step.compute for step in mine) for mine in counted]
    whole = [step for mine in counted if len(mine) >= cycle for step in mine] or [s for mine in counted for s in mine]
    sent = statistics.fmean(map(_sent, whole))
    every = sum(node.sent for node in books.nodes if node.node >= 0)
    return Rehearsal(
        statistics.fmean(periods),
        sum(1 / period for period in periods if period) if any(periods) else math.inf,
        sum(busy) / sum(periods) if any(periods) else 1.0,
        engine.factor * sent,
        engine.factor * sent * books.workers * _busiest(books) / every if every else 0.0,
        statistics.fmean(step.messages_sent for step in whole),
        statistics.fmean(books.staleness) if books.staleness else None,
        max(books.staleness, default=None),
        steps,
        True,
        engine.batches,
    )


def _require_alike(stage: _Stage) -> None:
    """Refuse what sends another share of a small stand-in than of one that is smaller still.

    Raises:
        Shrunk: it does.
    """
    steps = _begun(stage, ELEMENTS, 2)
    large, small = (_of_size(stage, size, steps) for size in (ELEMENTS, ELEMENTS // 4))
    for name in ("sent_per_step", "messages_per_step"):
        one, other = getattr(large, name), getattr(small, name)
        if abs(one - other) > ALIKE * max(one, other):
            raise Shrunk(
                f"it sends other shares of a stand-in of {ELEMENTS:,} elements than of one of {ELEMENTS // 4:,}, so "
                "that neither can stand for the model"
            )
