"""Edges around the dead: how neighbours that a worker joined stay joined without it."""

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
    """A symmetric doubly stochastic W without those workers: symmetric, and doubly stochastic on the others.

    One after the other leaves, by rank; its neighbours keep what they gave to it, and give it to each other in a circle
    as far as it goes: the two beside a gap in a ring close it. A connected graph stays connected.
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
    """For each worker, those that may come to wait for it: within four edges, which new ones do not exceed.

    Whoever leaves tells these; to tell everyone takes n² messages.
    """
    near = np.eye(n) + sum(mixing(topology, n))
    for _ in range(2):
        near = ((near @ near) > 0).astype(np.float64)
    return tuple(tuple(int(j) for j in np.flatnonzero(row) if j != rank) for rank, row in enumerate(near))


class Bridge(Note, frozen=True):
    """Beside a model over a new edge: the weight that its sender offers."""

    weight: float


@dataclass
class Bridges:
    """A worker's exchanges over new edges.

    Both ends send a model, and move by u times the difference of the two, in opposite directions: their sum stays. The
    next exchange begins when the last is complete, so that the ends of a new edge need not be at the same step, and
    nobody waits for one that does not know yet.
    """

    sent: dict[Address, tuple[FlatArray, float]] = field(default_factory=dict)
    """Models that wait for their counterpart, and the weight offered with them, by receiver."""
    heard: dict[Address, list[Message]] = field(default_factory=dict)
    """Counterparts that came before, by sender."""

    def offer(self, me: Worker, weights: Matrix) -> None:
        """Send the model over every new edge on which the last exchange is complete."""
        extra = rewired(weights, me.lost)[me.rank] - weights[me.rank]
        for j in map(int, np.flatnonzero(extra > 0)):
            if j != me.rank and j not in self.sent:
                self.sent[j] = copied(me.params), float(extra[j])
                me.send(j, "bridge", me.params, Bridge(float(extra[j])))

    def cross(self, me: Worker) -> None:
        """Move by what has come in by now; does not wait."""
        for message in me.arrived("bridge"):
            self.heard.setdefault(message.source, []).append(message)
        for j in sorted(self.sent.keys() & self.heard.keys()):
            self._move(me, self.heard[j].pop(0))
            if not self.heard[j]:
                del self.heard[j]

    async def close(self, me: Worker) -> None:
        """Complete the exchanges that the other end has begun as well."""
        self.cross(me)
        for j in sorted(self.sent):
            try:
                self._move(me, await me.receive("bridge", j))
            except PeerLost:
                del self.sent[j]  # it has left without another model: neither end moves

    def _move(self, me: Worker, message: Message) -> None:
        model, weight = self.sent.pop(message.source)
        share = min(weight, message.note.weight)
        me.params += share * (message.payload - model)
        me.record_update(message.source, max(0, me.step - message.step))
