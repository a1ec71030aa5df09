"""D-PSGD: each worker averages with its neighbors on a graph while it computes its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from flockstep.arrays.kernels import name_of, numpy_dtype
from flockstep.arrays.schema import FlatArray
from flockstep.errors import PeerLost
from flockstep.messages import LEAVE, Notes, node_name
from flockstep.nodes import Worker
from flockstep.strategies.aggregations import Aggregation, Mean
from flockstep.strategies.base import Strategy, TaxonomyEntry, Traits
from flockstep.strategies.resizing import Resizing
from flockstep.strategies.rewiring import Bridge, Bridges, within_reach
from flockstep.topologies.base import Topology
from flockstep.topologies.facts import Matrix, hearing, mixing
from flockstep.topologies.requirements import require_doubly_stochastic, require_symmetric
from flockstep.topologies.ring import RingGraph


@dataclass(frozen=True)
class NeighborAveraging(Strategy):
    """D-PSGD (Lian et al. 2017, algorithm 1): every worker averages its model with the models of its neighbors on a
    graph.

    w_i ← Σ_j W_ij w_j - η g_i(w_i), where W is symmetric and doubly stochastic. A worker first sends its model,
    computes the gradient while the model travels, and waits for the neighbors' models last: an iteration takes as long
    as the longer of computing and communicating. The mean of the replicas moves as in synchronous SGD; the replicas
    agree only in the limit. The graph may change from step to step. The neighbors of a dead worker take back the
    weights that they gave to this worker, and on a graph that does not change these neighbors are connected to each
    other; the paper does not treat failures.

    An `aggregation` takes the place of Σ_j W_ij w_j: centered_clipping weights the neighbors by W (self-centered
    clipping: He, Karimireddy & Jaggi 2022); other aggregations combine the models of a worker and its neighbors without
    W (BRIDGE: Yang & Bajwa 2019, for trimmed_mean and median). The mean of the replicas then differs from that of
    synchronous SGD.
    """

    notes: ClassVar[Notes] = {"bridge": Bridge}

    topology: Topology = field(default_factory=RingGraph)
    aggregation: Aggregation = field(default_factory=Mean)

    # Updates spread along the graph's edges; neighbors of a dead worker are connected.
    traits = Traits(delivery="partial", survives=True, results=("mean", "rank0", "best"), equal_steps=True)

    @property
    def taxonomy_entry(self) -> TaxonomyEntry:
        """The taxonomy entry of replicas that average with their neighbors; the taxonomy has a separate entry for the
        ring.
        """
        ring = isinstance(self.topology, RingGraph)
        return TaxonomyEntry(
            "decentral", "sync", "2:1 reduce" if ring else "reduce", "closed ring" if ring else "graph"
        )

    def check(self, workers: int) -> None:
        """Check that the mixing matrix is symmetric and doubly stochastic, so that mixing keeps the mean.

        Raises:
            ConfigurationError: the topology's mixing matrix is not symmetric or not doubly stochastic.
        """
        require_doubly_stochastic(self.topology, workers, f"dpsgd on {self.topology}")
        require_symmetric(self.topology, workers, f"dpsgd on {self.topology}")
        for weights in {} if self.aggregation.linear else mixing(self.topology, workers):
            for rank in range(workers):
                self.aggregation.check(1 + len(hearing(weights, rank)))

    resizing = Resizing(replicas="own")

    def worker_state(self, me: Worker) -> Bridges:
        return Bridges()

    async def worker(self, me: Worker) -> None:
        """Send the model, compute the gradient, receive the neighbors' models, mix the models, and take the step."""
        bridges: Bridges = me.state
        schedule = mixing(self.topology, me.workers)
        turns = [(hearing(weights, me.rank), _shares(me, weights)) for weights in schedule]
        while me.training:
            others, shares = turns[me.step % len(turns)]
            me.send_all(others, "model", me.params)
            if me.lost and len(schedule) == 1:
                bridges.offer(me, schedule[0])
            gradient = await me.gradient()
            await self._mix(me, shares)
            bridges.cross(me)
            me.optimizer_step(gradient)

    async def finish(self, me: Worker) -> None:
        """Leave the run, then complete the exchanges over new edges that the other ends of the edges have started."""
        me.leave()
        me.send_all(me.peers if me.lost else within_reach(self.topology, me.workers)[me.rank], LEAVE)
        await me.state.close(me)

    async def _mix(self, me: Worker, shares: Sequence[tuple[int, float]]) -> None:
        """w_i ← Σ_j W_ij w_j, with w_i in place of the model of a dead neighbor j."""
        if not self.aggregation.linear:
            others = [(await _heard(me, j), share) for j, share in shares if j != me.rank]
            if others:
                models, weights = zip(*others, strict=True)
                me.params[:] = self.aggregation.mix(me.params, models, weights)
            return
        mixed: FlatArray | None = None
        for j, share in shares:
            model = me.params if j == me.rank else await _heard(me, j)
            if mixed is None:
                mixed = share * model
            else:
                mixed += share * model
        me.params[:] = mixed


def _shares(me: Worker, weights: Matrix) -> list[tuple[int, float]]:
    """Return (rank j, W_ij) in order of rank, for all j with W_ij ≠ 0, W_ij rounded to the parameters' dtype."""
    shares = weights[me.rank].astype(numpy_dtype(name_of(me.params)))
    return [(int(j), float(shares[j])) for j in np.flatnonzero(shares)]


async def _heard(me: Worker, j: int) -> FlatArray:
    """Return neighbor j's model of the current step, or this worker's own model if j is dead.

    Raises:
        PeerLost: the model was lost, or j has left.
    """
    try:
        message = await me.receive("model", j)
        while message.step < me.step - 1 and j in me.lost:  # was in transit when the report of j's death arrived
            message = await me.receive("model", j)
    except PeerLost:
        if j not in me.lost:
            raise
        return me.params
    if message.step != me.step - 1:
        raise PeerLost(
            f"the model of {node_name(j)} at step {me.step - 1} was lost: {node_name(me.rank)} received the model of "
            f"step {message.step}; start again from the last checkpoint"
        )
    me.record_update(j, 0)
    return message.payload
