"""Partial broadcast: every update is sent to some of the peers, and dropped or deferred for the other peers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flockstep.arrays.exact_sum import ExactSum, on_grid
from flockstep.arrays.kernels import name_of
from flockstep.arrays.namespace import cast, copied, zeros
from flockstep.arrays.schema import FlatArray
from flockstep.errors import require
from flockstep.messages import Notes
from flockstep.nodes import Worker
from flockstep.strategies.base import Strategy, TaxonomyEntry, Traits
from flockstep.strategies.broadcast import Broadcast, BroadcastState, StepCount, absorb_arrived, drain, own_update


@dataclass
class PartialState(BroadcastState):
    """A worker's state: the exact sum of all updates, and an (n, K) array whose row j is the sum of the updates not yet
    sent to peer j.
    """

    deferred: FlatArray
    """Sum of the updates not yet sent to each peer, of shape (n, K), in float64; row j belongs to peer j."""
    counts: list[int]
    held: FlatArray | None = None
    """This worker's update (K,) that waits to be averaged with arriving updates; None if there is none."""


@dataclass(frozen=True)
class PartialBroadcast(Strategy):
    """Partial communication (FAST, section 3, class 4): each update reaches each peer with probability `share` (q).

    With rest = "drop", an update that is not sent to a peer is lost to that peer; replicas never agree, and on non-IID
    data the mean model fails. With rest = "defer", the update is added to the next message to that peer, so that
    communication is complete, with unbounded delay, and Statement 1 holds after the final flush. Deferring takes memory
    for n · K numbers on each worker. With "drop" and "defer", share = 1 equals `broadcast`, bit for bit. With rest =
    "average", updates are dropped as with "drop", but a worker moves by the mean of its own update and the updates that
    have arrived since its last step, which differs from `broadcast` even with share = 1.
    """

    notes: ClassVar[Notes] = Broadcast.notes

    share: float = 0.25
    rest: Literal["drop", "average", "defer"] = "defer"
    scale: float = 1.0

    def __post_init__(self) -> None:
        require(0 < self.share <= 1, "share", "in (0, 1]", self.share, "use 1 to send every update to all workers")
        require(
            0 < self.scale < float("inf"), "scale", "> 0 and finite", self.scale, "1 adds up the updates of the workers"
        )

    @property
    def traits(self) -> Traits:
        """The strategy's traits: unbounded delay if updates are deferred, partial delivery if updates are dropped. Any
        number of workers may die.
        """
        return Traits(
            delivery="unbounded delay" if self.rest == "defer" else "partial",
            survives=True,
            results=("mean", "rank0", "best"),
        )

    taxonomy_entry = TaxonomyEntry("decentral", "async", "ad hoc", "p2p mesh")

    def expected_sends(self, workers: int, steps: int) -> float | None:
        return None if self.rest == "defer" else workers * (workers - 1) * steps * self.share

    def worker_state(self, me: Worker) -> PartialState:
        rows = me.workers if self.rest == "defer" and me.workers > 1 else 0
        exact_sum = ExactSum.of(me.params) if me.workers > 1 else None
        wide = cast(me.params, "float64")
        return PartialState(exact_sum, zeros(wide, rows, len(wide)), [0] * me.workers)

    async def worker(self, me: Worker) -> None:
        state: PartialState = me.state
        averages = self.rest == "average" and me.workers > 1
        while me.training:
            (average_arrived if averages else absorb_arrived)(me, state)
            gradient = await me.gradient()
            update = (held_update if averages else own_update)(me, state, gradient, self.scale)
            chosen = [peer for peer in me.peers if me.random.random() < self.share]
            if self.rest != "defer":
                me.send_all(chosen, "update", update, StepCount())
            elif me.peers:
                state.deferred[me.peers] += update
                for peer in me.peers:
                    state.counts[peer] += 1
                for peer in chosen:
                    send_deferred(me, state, peer)

    async def finish(self, me: Worker) -> None:
        """Send all deferred updates, leave the run, and add the updates that are still in transit."""
        state: PartialState = me.state
        if self.rest == "defer":
            for peer in me.peers:
                while state.counts[peer] or state.deferred[peer].any():
                    send_deferred(me, state, peer)
        average_arrived(me, state)
        me.leave(peers=True)
        if self.rest == "average":  # updates that arrive after the last step are part of no mean
            async for _ in me.messages():
                pass
        else:
            await drain(me, state)


def held_update(me: Worker, state: PartialState, gradient: FlatArray, scale: float) -> FlatArray:
    """Compute an optimizer step times `scale` without moving the replica, and return the update (K,), which is also
    stored as the held update.
    """
    before = copied(me.params)
    me.optimizer_step(gradient)
    state.held = on_grid(scale * (me.params - before))
    me.params[:] = before
    return state.held


def average_arrived(me: Worker, state: PartialState) -> None:
    """Move the replica by the mean of the held update (if any) and the updates that have arrived since the last
    step.
    """
    if state.held is None or state.exact_sum is None:
        return
    messages = list(me.arrived("update"))
    total = state.held + sum(message.payload for message in messages)
    for message in messages:
        me.record_update(message.source, max(0, me.step - message.step))
    state.held = None
    state.exact_sum.add(on_grid(total / (1 + len(messages))))
    state.exact_sum.write(me.params)


def send_deferred(me: Worker, state: PartialState, peer: int) -> None:
    """Send a peer the sum of its deferred updates. The part that is lost by rounding to the parameters' dtype stays
    deferred.
    """
    update = on_grid(cast(state.deferred[peer], name_of(me.params)))
    me.send(peer, "update", update, StepCount(state.counts[peer]))
    state.deferred[peer] -= update
    state.counts[peer] = 0
