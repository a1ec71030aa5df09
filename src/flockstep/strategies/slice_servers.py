"""Asynchronous parameter servers on the workers: every worker serves 1/n of the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from flockstep.arrays.schema import FlatArray, slices
from flockstep.messages import Notes
from flockstep.nodes import Worker
from flockstep.optimizers.base import OptimizerState
from flockstep.strategies.access import ParameterVersion, Pushed
from flockstep.strategies.base import Strategy, TaxonomyEntry, Traits
from flockstep.strategies.resizing import FormerWorker, Resizing, take_slice

CHANNEL = "slices"


@dataclass
class ServedState:
    """A worker's state: the optimizer state and the version of the slice that it serves, and the version of each slice
    that it has read.
    """

    optimizer: OptimizerState
    version: int
    versions: list[int]


@dataclass(frozen=True)
class SliceServers(Strategy):
    """Asynchronous parameter servers on the workers themselves, k = n (MXNet dist_async: Chen et al. 2015).

    Worker j owns slice j of w. When slice j of a gradient arrives, from any worker including itself, worker j steps its
    slice with the job's optimizer, and answers with the new slice. A worker serves its slice while it waits for answers
    and, in virtual time, while it computes; in a separate process, it serves between gradients, so a push waits for the
    gradient in progress. The staleness of a gradient's slice is the number of updates of the slice since the worker
    read it.
    """

    notes: ClassVar[Notes] = {"push/slices": Pushed, "reply to push/slices": ParameterVersion}

    # No worker waits for another's gradient; the slice of a dead worker is lost.
    traits = Traits(
        delivery="unbounded delay",
        survives=False,
        results=("mean", "rank0", "best"),
        server_optimizer=True,
        own_rates=True,
    )
    taxonomy_entry = TaxonomyEntry("central", "async", "ad hoc", "distributed PS (k = n)")

    resizing = Resizing(also="the state of the optimizer is cut into the new slices")

    def take_over(self, me: Worker, former: Sequence[FormerWorker]) -> None:
        state: ServedState = me.state
        part = slices(len(me.params), me.workers)[me.rank]
        take_slice(state.optimizer, part, [one.state.optimizer for one in former])

    def worker_state(self, me: Worker) -> ServedState:
        assert me.optimizer is not None
        own = slices(len(me.params), me.workers)[me.rank]
        return ServedState(me.optimizer.init_slice(me.params, own), 0, [0] * me.workers)

    async def worker(self, me: Worker) -> None:
        """Compute a gradient, push every slice to its owner, and receive the new slices; serve this worker's slice
        concurrently.
        """
        state: ServedState = me.state
        for rank in me.peers:
            me.background(CHANNEL, self._serve(me, rank), again="afresh")
        while me.training:
            state.versions[me.rank] = state.version
            gradient = await me.gradient()
            await me.finished(me.background(CHANNEL, self._exchange(me, gradient)))

    async def finish(self, me: Worker) -> None:
        """Serve the worker's slice until all workers have finished, exchange the final slices, and leave the run."""
        await me.finished(me.background(CHANNEL, self._close(me)))
        me.leave()

    async def _serve(self, me: Worker, rank: int) -> None:
        """Step the own slice for every push of worker `rank`, and answer with it; an empty push is the last."""
        state: ServedState = me.state
        own = me.params[slices(len(me.params), me.workers)[me.rank]]
        while (push := await me.receive("push", rank)).array is not None:
            me.record_update(rank, state.version - push.note.version, weight=1.0)
            self._step(me, push.array, push.note.lr)
            me.reply(push, own, ParameterVersion(state.version))
        me.send(me.rank, "ended")

    async def _exchange(self, me: Worker, gradient: FlatArray) -> None:
        """Step the own slice, push the other slices and receive their owners' answers."""
        state: ServedState = me.state
        parts = slices(len(me.params), me.workers)
        me.record_update(me.rank, state.version - state.versions[me.rank], weight=1.0)
        self._step(me, gradient[parts[me.rank]], me.lr)
        pushes = [(r, gradient[parts[r]], Pushed(state.versions[r], me.lr)) for r in me.peers]
        for reply in await me.ask_all("push", pushes):
            me.params[parts[reply.source]] = reply.payload
            state.versions[reply.source] = reply.note.version

    async def _close(self, me: Worker) -> None:
        parts = slices(len(me.params), me.workers)
        me.send_all(me.peers, "push", None, Pushed(0, me.lr))
        for _ in me.peers:
            await me.receive("ended", me.rank)
        me.send_all(me.peers, "final", me.params[parts[me.rank]])
        for rank in me.peers:
            me.params[parts[rank]] = (await me.receive("final", rank)).payload

    def _step(self, me: Worker, piece: FlatArray, lr: float) -> None:
        state: ServedState = me.state
        own = me.params[slices(len(me.params), me.workers)[me.rank]]
        assert me.optimizer is not None
        me.optimizer.step(own, piece, state.optimizer, lr)
        state.version += 1
