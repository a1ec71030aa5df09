"""Which model a run has at a given moment, evaluated off the clock.

Every node hands in its parameters at the same ticks of progress; when a tick is complete, the model that the result
policy would choose then is evaluated, and the replicas' distance from their mean is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from flockstep.arrays.schema import FlatArray
from flockstep.drivers.account import Emit, fingerprint
from flockstep.frameworks.base import Engine, Evaluation
from flockstep.messages import Address, Message, server
from flockstep.nodes import Cluster
from flockstep.records.events import Replica, Snapshot
from flockstep.strategies.base import ResultPolicy

FINAL = math.inf
"""The tick of a node's parameters when its program has ended."""


@dataclass
class Tick:
    """What was handed in for one tick. Sums are of distances to the first replica: equal ones give exactly 0."""

    missing: set[Address]
    workers: int = 0
    t: float = 0.0
    steps: int = 0
    samples: int = 0
    sent: int = 0
    reference: FlatArray | None = None
    offset: npt.NDArray[np.float64] | None = None
    squares: float = 0.0
    kept: dict[Address, FlatArray] = field(default_factory=dict)

    def add_worker(self, params: FlatArray, step: int, sent: int, samples: int = 0) -> None:
        """Add a replica to the sums."""
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
        """The mean replica."""
        assert self.reference is not None
        assert self.offset is not None
        mean: FlatArray = (self.reference + self.offset / self.workers).astype(self.reference.dtype)
        return mean

    def divergence(self) -> float:
        """Root mean square distance of the replicas from their mean."""
        assert self.offset is not None
        mean_offset = self.offset / self.workers
        return math.sqrt(
            max(self.squares / self.workers - float(mean_offset @ mean_offset), 0.0)
        )  # not a number stays so

    def model(self, policy: ResultPolicy, held: Sequence[slice]) -> FlatArray | None:
        """The model that a policy chooses without evaluating any; None where the node that holds it is missing."""
        if policy == "mean":
            return self.mean() if self.workers else None
        if policy == "server":
            return self._served(held)
        if policy == "ensemble":
            return None  # everyone keeps its own
        # The first replica that is still there stands in for a lost rank 0.
        return self.kept.get(0, self.reference)

    def _served(self, held: Sequence[slice]) -> FlatArray | None:
        """What the servers hold together; where two hold the same, what the first one does."""
        if not self.kept:
            return None
        size, dtype = max(part.stop for part in held), next(iter(self.kept.values())).dtype
        whole, known = np.empty(size, dtype), np.zeros(size, bool)
        for index in reversed(range(len(held))):
            params = self.kept.get(server(index))
            if params is not None:
                whole[held[index]], known[held[index]] = params, True
        return whole if known.all() else None


class Tracker:
    """Collects the ticks of one run; evaluates each once it is complete."""

    def __init__(
        self,
        engine: Engine,
        policy: ResultPolicy,
        cluster: Cluster,
        held: Sequence[slice],
        samples: Callable[[int], int],
        emit: Emit,
    ):
        """`held`: for each server, which of the parameters it holds; `samples`: those of a worker after some steps."""
        self.result: FlatArray | None = None
        self.evaluation: Evaluation | None = None
        self._engine = engine
        self._policy = policy
        self._cluster = cluster
        self._held = held
        self._samples = samples
        self._emit = emit
        self._idle = {server(i) for i in range(cluster.servers)} - {server(i) for i in deciding(held)}
        self._alive = set(cluster.addresses) - self._idle
        self._ticks: dict[float, Tick] = {}
        self._latest = -1.0
        self._own: dict[str, Evaluation] = {}

    def add(self, tick: float, address: Address, params: FlatArray, t: float, step: int, sent: int) -> None:
        """Take a node's parameters as they are now (copied where they are kept); those of a mere cache are dropped."""
        if address in self._idle:
            return
        entry = self._ticks.setdefault(tick, Tick(set(self._alive)))
        entry.missing.discard(address)
        entry.t = max(entry.t, t)
        if address >= 0:
            entry.add_worker(params, step, sent, self._samples(step))
        if self._keeps(address):
            entry.kept[address] = params.copy()
        if tick == FINAL and address >= 0:
            self._evaluate_own(address, params, t)
        if not entry.missing:
            self._evaluate(tick)

    def lose(self, address: Address) -> None:
        """Wait for this node no more."""
        self._alive.discard(address)
        for tick in sorted(self._ticks):
            entry = self._ticks[tick]
            entry.missing.discard(address)
            if not entry.missing:
                self._evaluate(tick)

    def close(self) -> None:
        """Evaluate what is left of the ticks that some nodes never reached, as far as the policy allows."""
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
        if params.ndim == 2:
            evaluation = self._engine.evaluate_together(params, sorted(entry.kept))
        else:
            evaluation = self._engine.evaluate(params, range(self._cluster.workers))
        if tick >= self._latest:
            self._latest, self.result, self.evaluation = tick, params, evaluation
        self._emit(
            Snapshot(
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
        """What a worker ended with by itself; evaluated once where all replicas are equal and have no buffers."""
        digest = fingerprint(params) if not len(self._engine.buffers(rank)) else f"worker {rank}"
        if digest not in self._own:
            self._own[digest] = self._engine.evaluate(params, [rank])
        own = self._own[digest]
        self._emit(Replica(t, rank, own.loss, own.metric))

    def _choose(self, entry: Tick) -> FlatArray | None:
        """The resulting model, (K,), or the members of an ensemble, (M, K)."""
        if self._policy == "ensemble":
            members = [params for _, params in sorted(entry.kept.items())]
            return np.stack(members) if len(members) > 1 else next(iter(members), None)
        if self._policy != "best":
            return entry.model(self._policy, self._held)
        return self._best([(self._engine.evaluate(p, [rank]), p) for rank, p in sorted(entry.kept.items())])

    def _best(self, ranked: list[tuple[Evaluation, FlatArray]]) -> FlatArray | None:
        if not ranked:
            return None
        sign = 1.0 if self._engine.higher_is_better else -1.0
        return max(ranked, key=lambda pair: sign * pair[0].metric)[1]


def deciding(held: Sequence[slice]) -> list[int]:
    """The servers that count: where several hold the same, the first one's parameters do."""
    known = np.zeros(max((part.stop for part in held), default=0), bool)
    indices = []
    for index, part in enumerate(held):
        if part.start == part.stop or not known[part].all():
            indices.append(index)
        known[part] = True
    return indices


@dataclass
class Progress:
    """A server's view of the workers' steps: tells when the next tick is due."""

    cluster: Cluster
    every: int
    seen: dict[int, int] = field(default_factory=dict)
    total: int = 0
    tick: int = 0

    def heard(self, message: Message) -> None:
        """A message says how far its sender is; a server's note may say how many `steps` its workers took."""
        source = message.source
        step = message.step if source >= 0 else int(message.note.get("steps", 0))
        if step > self.seen.get(source, 0):
            self.total += step - self.seen.get(source, 0)
            self.seen[source] = step

    def due(self) -> list[int]:
        """The ticks that have been reached since the last call."""
        reached = []
        while self.total >= self.tick * self.every * self.cluster.workers:
            reached.append(self.tick)
            self.tick += 1
        return reached
