"""Averaging of pairs on a bipartite graph, beside the gradient."""

from __future__ import annotations

from dataclasses import dataclass, field

from flockstep.errors import PeerLost
from flockstep.messages import BYE
from flockstep.nodes import Worker
from flockstep.strategies.base import Cell, Strategy, Traits
from flockstep.topologies.base import Topology
from flockstep.topologies.requirements import sides
from flockstep.topologies.ring import RingGraph

PAIRS = "pairs"
"""The channel in which models are averaged."""


@dataclass(frozen=True)
class PairwiseAveraging(Strategy):
    """AD-PSGD (Lian, Zhang, Zhang & Liu 2018, algorithm 1).

    While it computes g_i(w_i), a worker of the active side of the graph averages with a random neighbour j, w_i and w_j
    ← (w_i + w_j) / 2, and then steps with the gradient, of the model as it was before. Those of the passive side do as
    well, but are only asked. They answer at once, also while they compute, and never wait, so that nobody can wait in a
    circle: hence a bipartite graph. On processes they answer between gradients, so a slow one holds up those that ask.
    The larger side is active, of equal ones that of worker 0.
    """

    topology: Topology = field(default_factory=RingGraph)

    # Random pairs; a dead worker is missed by those that ask it, and then left out.
    traits = Traits(completeness=4, survives=True, results=("mean", "rank0", "best"))
    cell = Cell("decentral", "soft-bounded async", "ad hoc", "graph")

    def check(self, workers: int) -> None:
        """The graph must have two sides."""
        sides(self.topology, workers, f"adpsgd on {self.topology}")

    async def worker(self, me: Worker) -> None:
        """Begin an average, or be ready for one; compute; step."""
        active, neighbours = self._place(me)
        answers = None if active else me.background(PAIRS, answer(me), again="afresh")
        while me.training:
            others = [j for j in neighbours if j not in me.lost]
            asks = None
            if active and others:
                asks = me.background(PAIRS, average(me, others[int(me.random.integers(len(others)))]))
            gradient = await me.gradient()
            if asks is not None:
                await me.finished(asks)
            me.optimizer_step(gradient)
        if answers is not None:
            await serve_out(me, neighbours)
            me.background(PAIRS, hush(me))
            await me.finished(answers)

    async def finish(self, me: Worker) -> None:
        """Tell those who may still be waiting to be asked."""
        me.leave(peers=True)

    def _place(self, me: Worker) -> tuple[bool, list[int]]:
        """Whether this worker asks, and its neighbours."""
        active, _ = sides(self.topology, me.workers, str(self))
        return me.rank in active, self.topology.neighbours(me.workers, me.rank)


async def average(me: Worker, other: int) -> None:
    """Active side: hand over the model, take the average. The model does not change in between."""
    try:
        reply = await me.ask(other, "model", me.params)
    except PeerLost:
        return  # neither half took effect, or the half of a worker that is no more
    me.params[:] = reply.payload
    me.record_update(other, max(0, me.step - reply.step))


async def answer(me: Worker) -> None:
    """Passive side: average with whoever asks, in one go, until told to stop."""
    while (message := await me.receive("model")).source != me.rank:
        me.params += message.payload
        me.params *= 0.5
        me.reply(message, me.params)
        me.record_update(message.source, max(0, me.step - message.step))


async def serve_out(me: Worker, neighbours: list[int]) -> None:
    """Passive side: wait until none of those who ask is left."""
    for j in neighbours:
        await me.receive(BYE, j)


async def hush(me: Worker) -> None:
    """End the answering."""
    me.send(me.rank, "model")
