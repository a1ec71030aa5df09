"""What a step of any strategy takes, from its own program run in virtual time with nothing to compute.

Only seconds and bytes are wanted, so the arrays are small and every byte of payload counts for many: the programs,
their messages and their waiting are those of the real model, and so are the virtual seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.drivers.plan import Plan
from flockstep.drivers.virtual import Simulation
from flockstep.errors import ConfigurationError
from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.numpy import Model, NumpyEngine
from flockstep.messages import HEADER_BYTES, Address
from flockstep.nodes import Cluster
from flockstep.optimizers.base import Optimizer
from flockstep.optimizers.sgd import SGD
from flockstep.records.events import Event, Node, Step, Update
from flockstep.simulation.compute import ComputeModel
from flockstep.simulation.network import Fabric, Network, Transit
from flockstep.strategies.base import Strategy, choose_result

ELEMENTS = 8192
"""Parameters of the stand-in for the model."""
STEPS = 40
LEFT_OUT = 0.25
"""Share of the steps at the beginning that do not count: a pipeline has to fill."""


@dataclass(frozen=True)
class Rehearsal:
    """What a run would be like. Seconds and bytes; a step is one gradient of one worker."""

    seconds_per_step: float
    """Of all workers, while they all train: the time between two gradients of a worker, in the mean."""
    steps_per_second: float
    """Gradients that all workers together compute."""
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


class _Scaled(Fabric):
    """A network on which every byte of payload weighs as much as `factor` bytes."""

    def __init__(self, fabric: Fabric, factor: float):
        self._inner = fabric
        self._factor = factor

    def depart(self, source: Address, to: Address, nbytes: int, t: float) -> Transit:
        return self._inner.depart(source, to, HEADER_BYTES + round((nbytes - HEADER_BYTES) * self._factor), t)

    def advance(self, transit: Transit) -> bool:
        return self._inner.advance(transit)


@dataclass(frozen=True)
class _Heavy(Network):
    """A network on which payloads weigh more."""

    network: Network
    factor: float

    def start(self, cluster: Cluster) -> Fabric:
        """The network's own hops."""
        return _Scaled(self.network.start(cluster), self.factor)


class _Nothing(Model):
    """A model without work: parameters in the proportions of the real model's tensors."""

    def __init__(self, sizes: tuple[int, ...]):
        self._sizes = sizes

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {f"w{i}": (size,) for i, size in enumerate(self._sizes)}

    def initial(self, random: np.random.Generator) -> dict[str, FlatArray]:
        return {f"w{i}": random.normal(size=size) for i, size in enumerate(self._sizes)}

    def gradients(
        self, params: Mapping[str, FlatArray], x: FlatArray, y: FlatArray, out: Mapping[str, FlatArray]
    ) -> FlatArray:
        for name, array in out.items():
            array[:] = 1e-3 * params[name]
        return np.zeros(len(x))

    def outputs(self, params: Mapping[str, FlatArray], x: FlatArray) -> FlatArray:
        return x

    def loss(self, params: Mapping[str, FlatArray], outputs: FlatArray, y: FlatArray) -> float:
        return 0.0


@dataclass
class _Books:
    """What of a run's events matters here."""

    steps: list[Step] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)

    def take(self, event: Event) -> None:
        """Keep an event."""
        if isinstance(event, Step):
            self.steps.append(event)
        elif isinstance(event, Node):
            self.nodes.append(event)
        elif isinstance(event, Update) and event.staleness is not None:
            self.staleness.append(event.staleness)


def rehearse(
    strategy: Strategy,
    workers: int,
    model_bytes: float,
    compute: ComputeModel,
    network: Network,
    *,
    tensors: tuple[int, ...] = (),
    dtype_bytes: int = 4,
    optimizer: Optimizer | None = None,
    steps: int = STEPS,
    seed: int = 0,
    listen: Callable[[Event], None] = lambda event: None,
) -> Rehearsal:
    """Run `strategy` in virtual time on a stand-in for a model of `model_bytes` bytes.

    `tensors` are the sizes of the model's tensors in elements (none: one tensor), which codecs and buckets look at;
    `listen` hears of every event, whose bytes are those of the stand-in.

    Raises:
        ConfigurationError: the strategy cannot run on so many workers.
    """
    strategy.check(workers)
    if steps < 2:
        raise ConfigurationError(f"a rehearsal needs >= 2 steps, got {steps}; {STEPS} is usual")
    sizes = _shrunk(tensors or (round(model_bytes / dtype_bytes),))
    cluster = Cluster(workers, strategy.servers_for(workers))
    engine = NumpyEngine(_job(workers, optimizer), seed, _Nothing(sizes))
    factor = model_bytes / engine.schema.nbytes
    parts = np.array_split(np.arange(engine.train_size), workers)
    plan = Plan(strategy, cluster, engine.optimizer, parts, 1, steps, seed, choose_result(strategy, None), steps)
    books = _Books()

    def both(event: Event) -> None:
        books.take(event)
        listen(event)

    simulation = Simulation(engine, plan, compute, _Heavy(network, factor), both)
    simulation.run()
    return _summary(books, workers, factor)


def _shrunk(tensors: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes in the same proportions, about `ELEMENTS` in all, none of them 0."""
    scale = min(1.0, ELEMENTS / max(1, sum(tensors)))
    return tuple(max(1, round(size * scale)) for size in tensors)


def _job(workers: int, optimizer: Optimizer | None) -> Job:
    samples = np.zeros((max(2, workers), 1))

    def data() -> Data:
        return Data(samples, np.zeros(len(samples)), samples, np.zeros(len(samples)))

    return Job(lambda: None, data, optimizer or SGD(lr=0.01), metric=lambda outputs, targets: 0.0, batch=1)


def _summary(books: _Books, workers: int, factor: float) -> Rehearsal:
    first = max(1, int(LEFT_OUT * max(step.step for step in books.steps)))
    counted = [step for step in books.steps if step.step > first]
    took = sum(step.compute + step.wait + step.comm for step in counted)
    servers = [node.sent for node in books.nodes if node.node < 0]
    every = sum(node.steps for node in books.nodes if node.node >= 0) / workers
    seconds = took / len(counted)
    return Rehearsal(
        seconds,
        workers / seconds,
        sum(step.compute for step in counted) / took if took else 1.0,
        factor * statistics.fmean(step.sent for step in counted),
        factor * max(servers, default=0) / every,
        statistics.fmean(step.messages_sent for step in counted),
        statistics.fmean(books.staleness) if books.staleness else None,
        max(books.staleness, default=None),
    )
