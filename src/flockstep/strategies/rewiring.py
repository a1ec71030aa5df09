"""New connections in a graph after deaths: the neighbors of a dead worker are connected to each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from flockstep.arrays.namespace import copied
from flockstep.arrays.schema import FlatArray
from flockstep.errors import PeerLost
from flockstep.messages import Address, Message, Note
from flockstep.nodes import Worker
from flockstep.topologies.base import Topology
from flockstep.topologies.facts import Matrix, mixing


def rewired(weights: Matrix, dead: set[Address]) -> Matrix:
    """Return W with the dead workers removed: symmetric, and doubly stochastic on the other workers.

    The dead workers are removed one by one, by rank. The neighbors of a removed worker take back the weights that they
    gave to it, and are connected in a circle, each edge with the smaller of the weights of its two ends. So the two
    neighbors beside a gap in a ring close the ring. A connected graph stays connected.

    Args:
        weights: a symmetric doubly stochastic matrix W, of shape (n, n).
        dead: the ranks of the dead workers.
    """
    mixing = weights.copy()
    for j in sorted(rank for rank in dead if rank >= 0):
        beside = [int(i) for i in np.flatnonzero(mixing[j]) if i != j]
        given = mixing[:, j].copy()
        mixing[beside, beside] += given[beside]
        mixing[j], mixing[:, j] = 0.0, 0.0
        circle = list(zip(beside, beside[1:] + beside[:1], strict=True)) if len(beside) > 2 else [tuple(beside)]
        for a, b in (pair for pair in circle if len(pair) == 2):
            share = min(given[a], given[b]) / (1 if len(beside) == 2 else 2)
            mixing[a, b] += share
            mixing[b, a] += share
            mixing[[a, b], [a, b]] -= share
    return mixing


@lru_cache(maxsize=8)
def within_reach(topology: Topology, n: int) -> tuple[tuple[int, ...], ...]:
    """Return, for each worker, the workers that may later wait for it: the workers within four edges, because new edges
    never reach farther.

    A worker that leaves notifies only these workers; notifying all workers would take n² messages.
    """
    near = np.eye(n) + sum(mixing(topology, n))
    for _ in range(2):
        near = ((near @ near) > 0).astype(np.float64)
    return tuple(tuple(int(j) for j in np.flatnonzero(row) if j != rank) for rank, row in enumerate(near))


class Bridge(Note, frozen=True):
    """Note sent with a model over a new edge of the graph: the weight that the sender offers for the edge."""

    weight: float


@dataclass
class Bridges:
    """A worker's exchanges over edges that were added after deaths.

    Both ends send a model, and move by u times the difference of the two models in opposite directions, so that the sum
    of the models does not change. The next exchange starts when the last exchange is complete. So the two ends of an
    edge may be at different steps, and no worker waits for a worker that does not yet know of the edge.
    """

    sent: dict[Address, tuple[FlatArray, float]] = field(default_factory=dict)
    """Receiver → the model that was sent to the receiver and awaits the receiver's model, and the weight offered with
    it.
    """
    heard: dict[Address, list[Message]] = field(default_factory=dict)
    """Sender → models that arrived over a new edge before this worker sent its own model."""

    def offer(self, me: Worker, weights: Matrix) -> None:
        """Send the model over every new edge whose previous exchange is complete."""
        extra = rewired(weights, me.lost)[me.rank] - weights[me.rank]
        for j in map(int, np.flatnonzero(extra > 0)):
            if j != me.rank and j not in self.sent:
                self.sent[j] = copied(me.params), float(extra[j])
                me.send(j, "bridge", me.params, Bridge(float(extra[j])))

    def cross(self, me: Worker) -> None:
        """Complete the exchanges whose models have arrived. Never wait for a model."""
        for message in me.arrived("bridge"):
            self.heard.setdefault(message.source, []).append(message)
        for j in sorted(self.sent.keys() & self.heard.keys()):
            self._move(me, self.heard[j].pop(0))
            if not self.heard[j]:
                del self.heard[j]

    async def close(self, me: Worker) -> None:
        """Complete the exchanges that the nodes at both ends of an edge have started."""
        self.cross(me)
        for j in sorted(self.sent):
            try:
                self._move(me, await me.receive("bridge", j))
            except PeerLost:
                del self.sent[j]  # j has left without sending a model: neither end moves

    def _move(self, me: Worker, message: Message) -> None:
        model, weight = self.sent.pop(message.source)
        share = min(weight, message.note.weight)
        me.params += share * (message.payload - model)
        me.record_update(message.source, max(0, me.step - message.step))
