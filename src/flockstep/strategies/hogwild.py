"""Hogwild!: lock-free updates of parameters in shared memory."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from flockstep.arrays.namespace import to_device_of, to_host
from flockstep.arrays.schema import FlatArray
from flockstep.errors import PeerLost
from flockstep.links.shared_memory import SharedMemory
from flockstep.messages import Note, Notes
from flockstep.nodes import Worker
from flockstep.optimizers.base import OptimizerState
from flockstep.strategies.base import Strategy, TaxonomyEntry, Traits


class WriterStopped(Note, frozen=True):
    """Note of a worker that has stopped writing: the number of coordinate updates that it made."""

    updated: int


class SegmentAddress(Note, frozen=True):
    """Note with the address of the memory that the workers share."""

    address: str


@dataclass
class HogwildState:
    """A worker's state: its optimizer state, and the number of coordinate updates that the worker has made."""

    optimizer: OptimizerState
    updated: int = 0


@dataclass
class Segment:
    """The memory that the workers share: the parameters (K,), and the number of updates counted for each coordinate
    (K,).
    """

    memory: SharedMemory
    params: FlatArray
    counts: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Hogwild(Strategy):
    """Hogwild! (Niu, Recht, Ré & Wright 2011): workers on one host read and write one parameter array without locks.

    Each step reads the parameters, computes the gradient g, and steps the coordinates where g is not zero, in place;
    with an optimizer that has state (momentum), all coordinates are stepped. Two workers that update one coordinate at
    the same time may lose an update. With `count`, lost updates are counted: every update also increments a counter
    without a lock, and the difference to the number of `updates` made is recorded as `lost_updates` (both in
    coordinates). With `locked`, workers update one at a time, for comparison. In virtual time, updates take no time, so
    that no update is lost.
    """

    notes: ClassVar[Notes] = {"stopped": WriterStopped, "memory": SegmentAddress}

    count: bool = True
    locked: bool = False

    # Every worker sees an update as soon as it is written; workers may die.
    traits = Traits("unbounded delay", True, ("rank0", "mean"), server_optimizer=True, restarts=False, own_rates=True)
    taxonomy_entry = TaxonomyEntry("central", "async", "ad hoc", "shared memory")

    def worker_state(self, me: Worker) -> HogwildState:
        assert me.optimizer is not None
        return HogwildState(me.optimizer.init(to_host(me.params)))

    async def worker(self, me: Worker) -> None:
        """Read the parameters, compute a gradient and write the update until the worker's steps are used up, then count
        the lost updates.
        """
        segment = await attached(me)
        while me.training:
            me.params[:] = to_device_of(segment.params, me.params)
            gradient = to_host(await me.gradient())
            if self.locked:
                with segment.memory.lock():
                    self.update(me, segment, gradient)
            else:
                self.update(me, segment, gradient)
        await self._conclude(me, segment)

    def update(self, me: Worker, segment: Segment, gradient: FlatArray) -> None:
        """Step the shared parameters along `gradient`, in place."""
        state: HogwildState = me.state
        assert me.optimizer is not None
        support = np.flatnonzero(gradient)
        if state.optimizer.slots or state.optimizer.foreign or len(support) == len(gradient):
            me.optimizer.step(segment.params, gradient, state.optimizer, me.lr)
            if self.count:
                segment.counts += 1
            state.updated += len(gradient)
            return
        touched = segment.params[support]
        me.optimizer.step(touched, gradient[support], state.optimizer, me.lr)
        segment.params[support] = touched
        if self.count:
            segment.counts[support] += 1
        state.updated += len(support)

    async def _conclude(self, me: Worker, segment: Segment) -> None:
        """Once all workers have stopped writing, record the lost updates and copy the final parameters."""
        state: HogwildState = me.state
        updated = state.updated
        if me.rank == 0:
            for peer in me.peers:
                with contextlib.suppress(PeerLost):
                    updated += (await me.receive("stopped", peer)).note.updated
            me.send_all(me.peers, "count")
            if self.count and not me.lost:  # a dead worker's number of updates is unknown
                me.record_scalar("updates", updated)
                me.record_scalar("lost_updates", updated - int(segment.counts.sum()))
        elif 0 in me.peers:
            me.send(0, "stopped", None, WriterStopped(updated))
            with contextlib.suppress(PeerLost):
                await me.receive("count", 0)
        me.params[:] = to_device_of(segment.params, me.params)

    async def finish(self, me: Worker) -> None:
        """Leave the run, and notify the peers that wait for this worker."""
        me.leave(peers=True)


async def attached(me: Worker) -> Segment:
    """Return the shared parameters, initialized by worker 0. All workers must call the function together.

    Raises:
        CompositionError: the workers are not on one host.
    """
    start = to_host(me.params)
    offset = -(-start.nbytes // 8) * 8
    if me.rank == 0:
        memory = SharedMemory.create(offset + 8 * len(start))
        memory.array(start.dtype, len(start))[:] = start
        me.send_all(me.peers, "memory", None, SegmentAddress(memory.address))
        for peer in me.peers:
            with contextlib.suppress(PeerLost):
                await me.receive("attached", peer)
    else:
        memory = SharedMemory.attach((await me.receive("memory", 0)).note.address)
        me.send(0, "attached")
    params: FlatArray = memory.array(start.dtype, len(start))
    counts: npt.NDArray[np.int64] = memory.array(np.int64, len(start), offset)  # type: ignore[assignment]
    return Segment(memory, params, counts)
