"""Averaging with the neighbours on a graph, overlapped with the gradient."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from flockstep.collectives.base import received
from flockstep.nodes import Worker
from flockstep.strategies.base import Cell, Strategy, Traits
from flockstep.topologies.base import Topology
from flockstep.topologies.facts import mixing, require_doubly_stochastic
from flockstep.topologies.ring import RingGraph


@dataclass(frozen=True)
class NeighbourAveraging(Strategy):
    """D-PSGD (Lian et al. 2017, algorithm 1).

    w_i ← Σ_j W_ij w_j - η g_i(w_i), where W is doubly stochastic. The model is sent first, the gradient computed while
    it travels, and the neighbours' models awaited last: an iteration takes the longer of computing and communicating.
    The mean of the replicas moves as in synchronous SGD; they agree only in the limit. Graphs with one-way edges, or
    that change from step to step, will do where every W is doubly stochastic (Ying et al. 2021).
    """

    topology: Topology = field(default_factory=RingGraph)

    @property
    def traits(self) -> Traits:
        """Updates diffuse over the graph; a dead neighbour stops everyone."""
        return Traits(completeness=4, survives=False, results=("mean", "rank0", "best"))

    @property
    def cell(self) -> Cell:
        """Replicas average with their neighbours."""
        ring = isinstance(self.topology, RingGraph)
        return Cell("decentral", "sync", "2:1 reduce" if ring else "reduce", "closed ring" if ring else "graph")

    def check(self, workers: int) -> None:
        """The mixing matrix must keep the mean."""
        require_doubly_stochastic(self.topology, workers, f"dpsgd on {self.topology}")

    async def worker(self, me: Worker) -> None:
        """Send, compute, await, mix, step."""
        schedule = [w.astype(me.params.dtype) for w in mixing(self.topology, me.workers)]
        while me.training:
            weights = schedule[me.step % len(schedule)]
            heard = [int(j) for j in np.flatnonzero(weights[me.rank])]
            hearing = [int(j) for j in np.flatnonzero(weights[:, me.rank]) if j != me.rank]
            me.send_all(hearing, "model", me.params)
            gradient = await me.gradient()
            mixed = np.full_like(me.params, -0.0)  # adding to it keeps every bit; 0 + (-0) would be 0
            for j in heard:  # by rank, so that the sum does not depend on who was first
                model = me.params if j == me.rank else await received(me, "model", j)
                mixed += weights[me.rank, j] * model
            me.params[:] = mixed
            me.optimizer_step(gradient)
            for j in heard:
                if j != me.rank:
                    me.record_update(j, 0)
