"""Peer-to-peer broadcast: every worker sends every update to every other worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flockstep.arrays.exact_sum import ExactSum, on_grid
from flockstep.arrays.namespace import copied
from flockstep.arrays.schema import FlatArray
from flockstep.errors import require
from flockstep.messages import Message, Note, Notes
from flockstep.nodes import Worker
from flockstep.strategies.base import Strategy, TaxonomyEntry, Traits


class StepCount(Note, frozen=True):
    """Note sent with an update: the number of steps that the update contains."""

    count: int = 1


@dataclass
class BroadcastState:
    """A worker's state: the exact sum of all updates so far. The sum is None in a run with one worker, where the order
    of additions is fixed.
    """

    exact_sum: ExactSum | None


@dataclass(frozen=True)
class Broadcast(Strategy):
    """Complete communication (FAST, section 3 and figure 3; its Statement 1): every update reaches every worker.

    Worker i computes its optimizer's step u, adds scale · u to its own replica, and sends the same array to every other
    worker, which adds it on arrival. Every update reaches every worker, so once the queues have drained, all replicas
    are equal in every bit: updates lie on a grid on which addition is exact in any order. A round of n workers moves
    every replica by the sum of n updates; with scale = 1/n a round is one large-batch step. Momentum stays with the
    sender.
    """

    notes: ClassVar[Notes] = {"update": StepCount}

    scale: float = 1.0

    def __post_init__(self) -> None:
        require(
            0 < self.scale < float("inf"), "scale", "> 0 and finite", self.scale, "1 adds up the updates of the workers"
        )

    # Complete, with unbounded delay; workers may die.
    traits = Traits(delivery="unbounded delay", survives=True, results=("rank0", "mean", "best"))
    taxonomy_entry = TaxonomyEntry("central", "async", "ad hoc", "p2p mesh")

    def worker_state(self, me: Worker) -> BroadcastState:
        return BroadcastState(ExactSum.of(me.params) if me.workers > 1 else None)

    async def worker(self, me: Worker) -> None:
        while me.training:
            absorb_arrived(me, me.state)
            update = own_update(me, me.state, await me.gradient(), self.scale)
            me.send_all(me.peers, "update", update, StepCount())

    async def finish(self, me: Worker) -> None:
        """Add the updates that are still in transit to this worker's replica, until all other workers have left."""
        me.leave(peers=True)
        await drain(me, me.state)


def own_update(me: Worker, state: BroadcastState, gradient: FlatArray, scale: float) -> FlatArray:
    """Take an optimizer step, and return the update (K,) exactly as the receivers will add it."""
    before = copied(me.params)
    me.optimizer_step(gradient)
    if state.exact_sum is None and scale == 1.0:
        return me.params - before
    update = on_grid(scale * (me.params - before))
    if state.exact_sum is None:
        me.params[:] = before + update
    else:
        state.exact_sum.add(update)
        state.exact_sum.write(me.params)
    return update


def absorb_arrived(me: Worker, state: BroadcastState) -> None:
    """Add every update that has arrived to this worker's replica."""
    messages = list(me.arrived("update"))
    for message in messages:
        _add(me, state, message)
    if messages and state.exact_sum is not None:
        state.exact_sum.write(me.params)


async def drain(me: Worker, state: BroadcastState) -> None:
    """Add every later update to this worker's replica as it arrives, until all other workers have left."""
    async for message in me.messages():
        if message.tag == "update":
            _add(me, state, message)
    if state.exact_sum is not None:
        state.exact_sum.write(me.params)


def _add(me: Worker, state: BroadcastState, message: Message) -> None:
    if state.exact_sum is not None:
        state.exact_sum.add(message.payload)
    me.record_update(message.source, max(0, me.step - message.step), message.note.count)
