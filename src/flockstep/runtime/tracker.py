"""Evaluates the model of a run at ticks of progress; evaluations take no time on the run's clock.

Every node sends its parameters at the same ticks of progress. When a tick is complete, the model that the result policy
would select at this tick is evaluated, and the replicas' distance from their mean is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from flockstep.arrays.namespace import to_host
from flockstep.arrays.schema import FlatArray
from flockstep.frameworks.base import Engine, Evaluation
from flockstep.messages import Address, Message, server
from flockstep.nodes import Cluster
from flockstep.records.events import EvaluationEvent, ReplicaEvent
from flockstep.runtime.node_metrics import Emit, fingerprint
from flockstep.strategies.base import ResultPolicy

FINAL = math.inf
"""Tick number that stands for the parameters of a node at the end of the run."""


@dataclass
class Tick:
    """The parameters that the nodes sent at one tick of progress. The sums are taken over differences from the first
    replica, so that the divergence of equal replicas is exactly 0.
    """

    missing: set[Address]
    workers: int = 0
    t: float = 0.0
    steps: int = 0
    samples: int = 0
    sent: int = 0
    reference: FlatArray | None = None
    offset: npt.NDArray[np.float64] | None = None
    squares: float = 0.0
    kept: MutableMapping[Address, FlatArray] = field(default_factory=dict)

    def ranks(self) -> list[int]:
        """Ranks of the workers whose parameters are stored individually, in addition to the sums."""
        return sorted(address for address in self.kept if address >= 0)

    def first(self) -> FlatArray | None:
        """The replica of the first worker that is present; None if there is none."""
        return self.reference

    def add_worker(self, params: FlatArray, step: int, sent: int, samples: int = 0) -> None:
        """Add a worker's replica to the sums from which the mean and the divergence are computed."""
        self.workers += 1
        self.steps += step
        self.samples += samples
        self.sent += sent
        if self.reference is None:
            self.reference = params.copy()
            self.offset = np.full(len(params), -0.0)  # adding it keeps every bit, the sign of a zero too
            return
        assert self.offset is not None
        distance = params.astype(np.float64) - self.reference
        self.offset += distance
        self.squares += float(distance @ distance)

    def mean(self) -> FlatArray:
        """The mean of the workers' replicas, an array of shape (K,)."""
        assert self.reference is not None
        assert self.offset is not None
        mean: FlatArray = (self.reference + self.offset / self.workers).astype(self.reference.dtype)
        return mean

    def variance(self) -> float:
        """Mean square distance of the replicas from their mean, up to rounding."""
        assert self.offset is not None
        mean_offset = self.offset / self.workers
        return self.squares / self.workers - float(mean_offset @ mean_offset)

    def divergence(self) -> float:
        """Root mean square distance of the replicas from their mean."""
        return math.sqrt(max(self.variance(), 0.0))  # NaN stays NaN

    def model(self, policy: ResultPolicy, held: Sequence[slice]) -> FlatArray | None:
        """The model that a result policy selects without evaluating any model; None if the node that holds the model is
        missing.
        """
        if policy == "mean":
            return self.mean() if self.workers else None
        if policy == "server":
            return self._served(held)
        if policy == "ensemble":
            return None  # each worker keeps its own
        # The first replica that is present replaces that of a lost rank 0.
        return self.kept[0] if 0 in self.kept else self.first()

    def _served(self, held: Sequence[slice]) -> FlatArray | None:
        """The parameters that the servers hold together; if several hold the same part, those of the first."""
        size = max((part.stop for part in held), default=0)
        whole: FlatArray | None = None
        known = np.zeros(size, bool)
        for index in reversed(range(len(held))):
            if server(index) in self.kept:
                params = self.kept[server(index)]
                whole = np.empty(size, params.dtype) if whole is None else whole
                whole[held[index]], known[held[index]] = params, True
        return whole if known.all() else None


class Tracker:
    """Collects the parameters that nodes send at each tick of progress, and evaluates the model of a tick when all have
    arrived.
    """

    def __init__(
        self,
        engine: Engine,
        policy: ResultPolicy,
        cluster: Cluster,
        held: Sequence[slice],
        samples: Callable[[int], int],
        emit: Emit,
        served: bool = False,
    ):
        """`held`: slice of the parameters that each server holds.

        `samples`: function from a worker's steps to its samples. `served`: whether the servers' progress is that of the
        run, and workers send nothing.
        """
        self.result: FlatArray | None = None
        self.buffers: dict[str, FlatArray] = {}
        """The buffers of the result: name → array."""
        self.evaluation: Evaluation | None = None
        self._engine = engine
        self._policy = policy
        self._cluster = cluster
        self._held = held
        self._samples = samples
        self._emit = emit
        self._idle = {server(i) for i in range(cluster.servers)} - {server(i) for i in deciding(held)}
        self._served = served
        self._alive = set(cluster.addresses[cluster.workers :] if served else cluster.addresses) - self._idle
        self._ticks: dict[float, Tick] = {}
        self._latest = -1.0
        self._ticks_of: dict[Address, float] = {}
        """Server → the newest tick of which it has sent its parameters."""
        self._own: dict[str, Evaluation] = {}

    def add(self, tick: float, address: Address, params: FlatArray, t: float, step: int, sent: int) -> None:
        """Add a node's current parameters to a tick; the parameters are copied if they are stored. Parameters of
        servers that only cache are ignored.
        """
        if address in self._idle or self._repeats(address, tick):
            return
        params = to_host(params)
        if (entry := self._ticks.get(tick)) is None:  # a set of all nodes for each of them would take n² time
            entry = self._ticks[tick] = Tick(set(self._alive))
        entry.missing.discard(address)
        entry.t = max(entry.t, t)
        if address >= 0:
            entry.add_worker(params, step, sent, self._samples(step))
        elif self._served:
            entry.add_worker(params, step, sent, self._samples(step) * self._cluster.workers)
        if self._keeps(address):
            entry.kept[address] = params.copy()
        if tick == FINAL and address >= 0:
            self._evaluate_own(address, params, t)
        if not entry.missing:
            self._evaluate(tick)

    def _repeats(self, address: Address, tick: float) -> bool:
        """Whether a backup that has taken the place of a server sends a tick again that the server had sent."""
        if address >= 0:
            return False
        repeats = tick <= self._ticks_of.get(address, -1.0)
        self._ticks_of[address] = max(tick, self._ticks_of.get(address, -1.0))
        return repeats

    def lose(self, address: Address) -> None:
        """Stop waiting for the parameters of a lost node."""
        self._alive.discard(address)
        for entry in self._ticks.values():
            entry.missing.discard(address)
        self._evaluate_complete()

    def _evaluate_complete(self) -> None:
        for tick in sorted(self._ticks):
            if not self._ticks[tick].missing:
                self._evaluate(tick)

    def close(self) -> None:
        """Evaluate the ticks that some nodes never reached, if the result policy allows an evaluation without them."""
        for tick in sorted(self._ticks):
            self._evaluate(tick)

    def _keeps(self, address: Address) -> bool:
        if self._policy == "server":
            return address < 0
        return address >= 0 if self._policy in ("best", "ensemble") else address == 0 and self._policy == "rank0"

    def _evaluate(self, tick: float) -> None:
        entry = self._ticks.pop(tick)
        params = self._choose(entry)
        if params is None or entry.workers == 0:
            return
        self._chosen(tick, entry, params)
        if params.ndim == 2:
            evaluation = self._engine.evaluate_together(params, entry.ranks())
        else:
            evaluation = self._engine.evaluate(params, range(self._cluster.workers))
        if tick >= self._latest:
            self._latest, self.evaluation = tick, evaluation
        self._emit(
            EvaluationEvent(
                entry.t,
                entry.steps / entry.workers,
                entry.samples,
                entry.sent / entry.workers,
                evaluation.loss,
                evaluation.metric,
                entry.divergence() if entry.workers == self._cluster.workers else None,
            )
        )

    def _evaluate_own(self, rank: int, params: FlatArray, t: float) -> None:
        """Evaluate a worker's final replica; equal replicas without buffers are evaluated once."""
        digest = fingerprint(params) if not len(self._engine.buffers(rank)) else f"worker {rank}"
        if digest not in self._own:
            self._own[digest] = self._engine.evaluate(params, [rank])
        own = self._own[digest]
        self._emit(ReplicaEvent(t, rank, own.loss, own.metric))

    def _chosen(self, tick: float, entry: Tick, params: FlatArray) -> None:
        """Hook before the model of a tick is evaluated."""
        if tick >= self._latest:
            self.result, self.buffers = params, self._buffers_of(entry, params)

    def _buffers_of(self, entry: Tick, params: FlatArray) -> dict[str, FlatArray]:
        """Return the buffers with which the model of a tick is evaluated: name → array; those of the members of an
        ensemble have a first axis more.
        """
        if params.ndim == 1:
            return self._engine.mean_buffers(range(self._cluster.workers))
        members = [self._engine.mean_buffers([rank]) for rank in entry.ranks()]
        return {name: np.stack([one[name] for one in members]) for name in members[0]}

    def _choose(self, entry: Tick) -> FlatArray | None:
        """The resulting model (K,), or the members of an ensemble (M, K)."""
        if self._policy == "ensemble":
            members = [entry.kept[rank] for rank in entry.ranks()]
            return np.stack(members) if len(members) > 1 else next(iter(members), None)
        if self._policy != "best":
            return entry.model(self._policy, self._held)
        sign = 1.0 if self._engine.higher_is_better else -1.0
        ranked = {rank: sign * self._engine.evaluate(entry.kept[rank], [rank]).metric for rank in entry.ranks()}
        return entry.kept[max(ranked, key=ranked.__getitem__)] if ranked else None


def deciding(held: Sequence[slice]) -> list[int]:
    """Return the indices of the servers whose parameters are evaluated: of several servers that hold the same part, the
    first.
    """
    known = np.zeros(max((part.stop for part in held), default=0), bool)
    indices = []
    for index, part in enumerate(held):
        if part.start == part.stop or not known[part].all():
            indices.append(index)
        known[part] = True
    return indices


@dataclass(slots=True)
class Progress:
    """Number of steps that each worker has taken, as far as a server knows; it determines when the next tick of
    progress is due.
    """

    cluster: Cluster
    every: int
    seen: dict[int, int] = field(default_factory=dict)
    total: int = 0
    tick: int = 0

    def heard(self, message: Message) -> None:
        """Record the progress of the sender of a message; a message from another server may give the `steps` of that
        server's workers.
        """
        source = message.source
        step = message.step if source >= 0 else getattr(message.note, "steps", 0)
        if step > (before := self.seen.get(source, 0)):
            self.total += step - before
            self.seen[source] = step

    def due(self) -> int | None:
        """Return the first tick of progress that has been reached since the previous call; None if none has."""
        if self.total < self.tick * self.every * self.cluster.workers:
            return None
        self.tick += 1
        return self.tick - 1
