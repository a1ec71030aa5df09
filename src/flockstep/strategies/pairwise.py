"""AD-PSGD: pairs of neighbors on a bipartite graph average their models while both compute gradients."""

from __future__ import annotations

from dataclasses import dataclass, field

from flockstep.errors import PeerLost
from flockstep.messages import LEAVE
from flockstep.nodes import Worker
from flockstep.strategies.base import Strategy, TaxonomyEntry, Traits
from flockstep.strategies.resizing import Resizing
from flockstep.topologies.base import Topology
from flockstep.topologies.requirements import sides
from flockstep.topologies.ring import RingGraph

PAIRS = "pairs"
"""Name of the channel of the background tasks that average models."""


@dataclass(frozen=True)
class PairwiseAveraging(Strategy):
    """AD-PSGD (Lian, Zhang, Zhang & Liu 2018, algorithm 1): random neighbors average their models asynchronously.

    While it computes g_i(w_i), a worker on the active side of the graph averages with a random neighbor j, w_i and w_j
    ← (w_i + w_j) / 2, and then steps with the gradient of the model before the average. Workers on the passive side
    also compute and step, but only answer requests. Passive workers answer at once, even while they compute, and never
    wait. So no cycle of workers that wait for each other can arise, which is why the graph must be bipartite. In
    separate processes, passive workers answer between gradients, so a slow passive worker delays the workers that send
    it requests. The larger side is active; of two equal sides, the side of worker 0.
    """

    topology: Topology = field(default_factory=RingGraph)

    # Random pairs; a request to a dead worker fails, and later requests skip that worker.
    traits = Traits(delivery="partial", survives=True, results=("mean", "rank0", "best"))
    taxonomy_entry = TaxonomyEntry("decentral", "soft-bounded async", "ad hoc", "graph")

    def check(self, workers: int) -> None:
        """Check that the graph is bipartite.

        Raises:
            ConfigurationError: the graph on `workers` workers is not bipartite.
        """
        sides(self.topology, workers, f"adpsgd on {self.topology}")

    resizing = Resizing(replicas="own")

    async def worker(self, me: Worker) -> None:
        """Start an average with a random neighbor (active side), or be ready to answer one (passive side); compute a
        gradient; take a step.
        """
        active, neighbors = self._place(me)
        answers = None if active else me.background(PAIRS, answer(me), again="afresh")
        while me.training:
            others = [j for j in neighbors if j not in me.lost]
            asks = None
            if active and others:
                asks = me.background(PAIRS, average(me, others[int(me.random.integers(len(others)))]))
            gradient = await me.gradient()
            if asks is not None:
                await me.finished(asks)
            me.optimizer_step(gradient)
        if answers is not None:
            await serve_out(me, neighbors)
            me.background(PAIRS, hush(me))
            await me.finished(answers)

    async def finish(self, me: Worker) -> None:
        """Leave the run, and notify the peers that may still wait for a message from this worker."""
        me.leave(peers=True)

    def _place(self, me: Worker) -> tuple[bool, list[int]]:
        """Return whether this worker is on the active side, and the ranks of its neighbors."""
        active, _ = sides(self.topology, me.workers, str(self))
        return me.rank in active, self.topology.neighbors(me.workers, me.rank)


async def average(me: Worker, other: int) -> None:
    """Average with a passive neighbor: send the model, and replace it with the average that the neighbor returns. The
    model does not change in between.
    """
    try:
        reply = await me.ask(other, "model", me.params)
    except PeerLost:
        return  # no half took effect, or only that of the dead worker
    me.params[:] = reply.payload
    me.record_update(other, max(0, me.step - reply.step))


async def answer(me: Worker) -> None:
    """Answer requests on the passive side: average atomically with each worker that sends its model, until this worker
    stops the task.
    """
    while (message := await me.receive("model")).source != me.rank:
        me.params += message.payload
        me.params *= 0.5
        me.reply(message, me.params)
        me.record_update(message.source, max(0, me.step - message.step))


async def serve_out(me: Worker, neighbors: list[int]) -> None:
    """Wait, on the passive side, until all neighbors on the active side have left, while the background task answers
    their requests.
    """
    for j in neighbors:
        await me.receive(LEAVE, j)


async def hush(me: Worker) -> None:
    """Stop the background task that answers requests."""
    me.send(me.rank, "model")
