"""Averages of replicas in the background, and a penalty that ties each replica to where the average must be by now."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from flockstep.arrays.namespace import copied
from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError
from flockstep.expression import searched
from flockstep.messages import Message, Note, Notes
from flockstep.nodes import Worker
from flockstep.strategies.base import Cell, Strategy, Traits
from flockstep.strategies.tree_server import family


class Snapshot(Note, frozen=True):
    """Beside a sum or mean of snapshots: whether any of their workers was still training."""

    training: bool


@dataclass
class Rounds:
    """What a worker knows of the averages."""

    snapshot: FlatArray | None = None
    """What this worker gives to the round under way, (K,); None: there is none."""
    training: bool = True
    """Whether this worker was still training then."""
    begun: int = 0
    """Step of that snapshot."""
    mean: FlatArray | None = None
    """The last average, (K,)."""
    at: int = 0
    """Step of the snapshot in that."""
    slope: FlatArray | None = None
    """Its change per step since the one before, (K,)."""


@dataclass(frozen=True)
class PenalisedAveraging(Strategy):
    """MPCA-SGD (Langer, Hall, He & Rahayu 2018): sharing is decoupled from updating, and staleness is extrapolated.

    A reconstruction from the abstract and the survey by Langer et al. (2020); the formulas were not at hand. Snapshots
    of all replicas are averaged up a binomial tree to worker 0 and down again, round after round, as fast as the
    network allows, while everyone trains on: nobody ever waits for a round before its last step. Training minimises
    loss + rho/2 |w - ŵ|², so that the gradient of the penalty goes through the optimiser like that of the loss. ŵ at
    step t is the last average, of snapshots taken at step s, moved on by gamma (t - s) times its change per step.
    Steps are the worker's own; a round's snapshots are as far apart in time as the mean takes down the tree.
    After their last steps workers go on with rounds until one holds nothing but final replicas. A worker alone has no
    rounds.
    """

    notes: ClassVar[Notes] = {"snapshot/round": Snapshot, "mean/round": Snapshot}

    rho: float = field(default=0.5, metadata=searched(0.05, 5.0, whole=False))
    gamma: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.rho < float("inf"):
            raise ConfigurationError(f"rho must be >= 0 and finite, got {self.rho}; 0.5 is usual, 0 for no penalty")
        if not 0 <= self.gamma <= 1:
            raise ConfigurationError(f"gamma must be in [0, 1], got {self.gamma}; 0 does not extrapolate")

    # Averages draw replicas together; a dead worker stops everyone.
    traits = Traits(completeness=4, survives=False, results=("mean", "rank0", "best"))
    cell = Cell("decentral", "soft-bounded async", "binomial tree", "dedicated master")

    def worker_state(self, me: Worker) -> Rounds:
        """No average is known."""
        return Rounds()

    async def worker(self, me: Worker) -> None:
        """Look after the rounds; step along the gradients of loss and penalty."""
        if me.state.snapshot is not None:  # a run that continues
            me.background("round", self.round(me, me.state), "replayed")
        while me.training:
            if me.workers > 1:
                await self.look_after(me)
            pull = self.penalty(me)
            gradient = await me.gradient()
            me.optimizer_step(gradient if pull is None else gradient + pull)

    async def finish(self, me: Worker) -> None:
        """Go on with rounds until everyone has ended."""
        state: Rounds = me.state
        training = me.workers > 1
        while training:
            if state.snapshot is None:
                self._begin(me, state, training=False)
            training = (await me.finished(me.task("round"))).note.training
            state.snapshot = None
        me.leave()

    async def look_after(self, me: Worker) -> None:
        """Take in a round that has ended; begin one where there is none. Does not wait."""
        state: Rounds = me.state
        if state.snapshot is not None and me.task("round").done:
            self.take_in(state, (await me.finished(me.task("round"))).payload)
            state.snapshot = None
        if state.snapshot is None:
            state.begun = me.step
            self._begin(me, state, training=True)

    def _begin(self, me: Worker, state: Rounds, training: bool) -> None:
        state.snapshot, state.training = copied(me.params), training
        me.background("round", self.round(me, state), "replayed")

    async def round(self, me: Worker, state: Rounds) -> Message:
        """The mean of all snapshots. Its note: whether anyone was training."""
        assert state.snapshot is not None
        total, training = copied(state.snapshot), state.training
        parent, children = family(me.rank, me.workers)
        for child in children:
            heard = await whole(me, "snapshot", child)
            total += heard.payload
            training |= heard.note.training
        if parent is None:
            total /= me.workers
            mean = Message(me.rank, "mean", total, Snapshot(training))
        else:
            me.send(parent, "snapshot", total, Snapshot(training))
            mean = await whole(me, "mean", parent)
        me.send_all(reversed(children), "mean", mean.payload, mean.note)  # the largest subtree first
        return mean

    def take_in(self, state: Rounds, mean: FlatArray) -> None:
        """A new average, of the snapshots of step `state.begun`."""
        if state.mean is not None and state.begun > state.at:
            state.slope = (mean - state.mean) / (state.begun - state.at)
        state.mean, state.at = mean, state.begun

    def predicted(self, state: Rounds, step: int) -> FlatArray | None:
        """ŵ at that step, (K,); None before the first average."""
        if state.mean is None or state.slope is None or not self.gamma:
            return state.mean
        ahead: FlatArray = self.gamma * (step - state.at) * state.slope
        return state.mean + ahead

    def penalty(self, me: Worker) -> FlatArray | None:
        """rho (w - ŵ), (K,); None where there is nothing to be drawn to."""
        towards = self.predicted(me.state, me.step) if self.rho else None
        return None if towards is None else self.rho * (me.params - towards)


async def whole(me: Worker, tag: str, source: int) -> Message:
    """The next message with that tag from that worker, none of whose messages may be missing.

    Raises:
        PeerLost: the worker has left or was lost.
        ProtocolError: one of its messages got lost.
    """
    message = await me.receive(tag, source)
    me.mailbox.require_all(source)
    return message
