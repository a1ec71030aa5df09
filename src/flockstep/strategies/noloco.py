"""NoLoCo: local steps, then an outer step of random pairs of workers, without any exchange among all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from flockstep.arrays.namespace import copied, namespace
from flockstep.arrays.schema import FlatArray
from flockstep.errors import PeerLost, require
from flockstep.messages import node_name
from flockstep.nodes import Worker
from flockstep.strategies.base import Strategy, TaxonomyEntry, Traits
from flockstep.strategies.resizing import Resizing


@dataclass
class SlowWeights:
    """A worker's state: its slow weights phi (K,), from which the local steps begin, and the outer momentum delta
    (K,).
    """

    model: FlatArray
    delta: FlatArray


@dataclass(frozen=True)
class NoLoCo(Strategy):
    """NoLoCo (Kolehmainen, Blagoev, Donaghy, Ersoy & Nies 2025): DiLoCo without all-reduce, by pairs of workers that
    are drawn anew for each outer step.

    After `period` local steps from its slow weights phi_i, worker i has theta_i and Delta_i = phi_i - theta_i. With the
    partner j of this outer step: delta_i ← momentum delta_i - lr (Delta_i + Delta_j) / 2 - gamma (phi_i - (phi_i +
    phi_j) / 2), and phi_i ← phi_i + delta_i. The term with `gamma` pulls the two slow weights together; as in the
    authors' code, gamma is lr by default. The pairs follow from a common `seed`. If the number of workers is odd, one
    worker makes the outer step alone, with its own Delta_i, and so does the partner of a dead worker.

    Partners send each other gamma phi - lr Delta, from which both means follow: K elements per worker and outer step. A
    worker waits for its partner alone.
    """

    period: int = 50
    lr: float = 0.7
    momentum: float = 0.5
    gamma: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.period >= 1, "period", ">= 1 local steps", self.period, "50 is usual")
        require(0 < self.lr < math.inf, "lr of noloco", "> 0 and finite", self.lr, "0.7 is usual")
        require(0 <= self.momentum < 1, "momentum of noloco", "in [0, 1)", self.momentum, "0.5 is usual")
        if self.gamma is not None:
            require(0 <= self.gamma < math.inf, "gamma of noloco", ">= 0 and finite", self.gamma, "leave it out for lr")
        require(self.seed >= 0, "seed of noloco", ">= 0", self.seed, "0 is usual")

    # Random pairs; the partner of a dead worker goes on alone.
    traits = Traits(delivery="partial", survives=True, results=("mean", "rank0", "best"), equal_steps=True)
    taxonomy_entry = TaxonomyEntry("decentral", "sync", "ad hoc", "p2p mesh")
    resizing = Resizing(replicas="own", own=("model", "delta"))

    def worker_state(self, me: Worker) -> SlowWeights:
        return SlowWeights(copied(me.params), namespace(me.params).zeros_like(me.params))

    def partner(self, workers: int, rank: int, outer_step: int) -> int | None:
        """Return the rank of a worker's partner in an outer step, counted from 1; None if the worker has none."""
        order = np.random.default_rng((self.seed, outer_step)).permutation(workers)
        place = int(np.flatnonzero(order == rank)[0]) ^ 1
        return int(order[place]) if place < workers else None

    async def worker(self, me: Worker) -> None:
        state: SlowWeights = me.state
        while me.training:
            me.optimizer_step(await me.gradient())
            if me.run_step % self.period == 0:
                await self._outer_step(me, state)

    async def _outer_step(self, me: Worker, state: SlowWeights) -> None:
        gamma = self.lr if self.gamma is None else self.gamma
        mine = gamma * state.model - self.lr * (state.model - me.params)
        partner = self.partner(me.workers, me.rank, me.run_step // self.period)
        theirs = None if partner is None else await _exchanged(me, partner, mine)
        state.delta *= self.momentum
        state.delta += (mine if theirs is None else (mine + theirs) / 2) - gamma * state.model
        state.model += state.delta
        me.params[:] = state.model


async def _exchanged(me: Worker, partner: int, mine: FlatArray) -> FlatArray | None:
    """Send an array to the partner, and return the partner's; None if the partner is dead.

    Raises:
        PeerLost: the partner's array was lost, or the partner has left.
    """
    if partner in me.lost:
        return None
    me.send(partner, "change", mine)
    try:
        message = await me.receive("change", partner)
    except PeerLost:
        if partner not in me.lost:
            raise
        return None
    if message.step != me.step:
        raise PeerLost(
            f"the change of {node_name(partner)} at step {me.step} was lost: {node_name(me.rank)} received the change "
            f"of step {message.step}; start again from the last checkpoint"
        )
    me.record_update(partner, 0)
    return message.payload
