"""MPCA-SGD: replicas are averaged in the background, and a penalty ties each replica to the extrapolated average."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flockstep.arrays.namespace import copied
from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError, require
from flockstep.messages import Message, Note, Notes
from flockstep.nodes import Worker
from flockstep.strategies.base import Strategy, TaxonomyEntry, Traits
from flockstep.strategies.resizing import Resizing
from flockstep.strategies.tree_server import family


class StillTraining(Note, frozen=True):
    """Note sent with a sum or mean of snapshots: whether any of the workers in the sum was still training."""

    training: bool


@dataclass
class MpcaState:
    """A worker's state: its snapshot for the current round, and the last average."""

    snapshot: FlatArray | None = None
    """This worker's snapshot of its parameters for the averaging round in progress, of shape (K,); None between
    rounds.
    """
    training: bool = True
    """Whether this worker was still training when it took the snapshot."""
    begun: int = 0
    """Step at which this worker took the snapshot."""
    mean: FlatArray | None = None
    """The last average of all workers' snapshots, of shape (K,); None before the first average."""
    at: int = 0
    """Step at which this worker took its snapshot for the last average."""
    slope: FlatArray | None = None
    """Change of the average per step between the last two averages, of shape (K,)."""


@dataclass(frozen=True)
class PenalizedAveraging(Strategy):
    """MPCA-SGD (Langer, Hall, He & Rahayu 2018): sharing is decoupled from updating, and staleness is extrapolated.

    The strategy is a reconstruction from the abstract and from the survey by Langer et al. (2020); the formulas were
    not available. Snapshots of all replicas are averaged up a binomial tree to worker 0 and down again, round after
    round, as fast as the network allows, while all workers continue training: no worker waits for a round before its
    last step. Training minimizes loss + rho/2 |w - ŵ|², so that the gradient of the penalty passes through the
    optimizer like that of the loss. ŵ at step t is the last average, of snapshots taken at step s, extrapolated by
    gamma (t - s) times its change per step. Steps are the worker's own; the snapshots of a round differ in time by as
    much as the average takes to travel down the tree. If rho times the learning rate is near 1/2 or above and a round
    lasts many steps, the replicas follow their own extrapolation and diverge: lower gamma, or the rate.

    After their last steps the workers continue with rounds until a round contains final replicas only. A single worker
    has no rounds.
    """

    notes: ClassVar[Notes] = {"snapshot/round": StillTraining, "mean/round": StillTraining}

    rho: float = 0.5
    gamma: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.rho < float("inf"):
            raise ConfigurationError(
                f"rho must be >= 0 and finite, got {self.rho}; 0.5 is usual, and 0 turns the penalty off"
            )
        require(0 <= self.gamma <= 1, "gamma", "in [0, 1]", self.gamma, "use 0 for no extrapolation")

    # The penalty draws replicas together; a dead worker stops all workers.
    traits = Traits(delivery="partial", survives=False, results=("mean", "rank0", "best"))
    taxonomy_entry = TaxonomyEntry("decentral", "soft-bounded async", "binomial tree", "dedicated master")

    resizing = Resizing(replicas="own")

    def worker_state(self, me: Worker) -> MpcaState:
        return MpcaState()

    async def worker(self, me: Worker) -> None:
        if me.state.snapshot is not None:  # a run that continues
            me.background("round", self.round(me, me.state), "replayed")
        while me.training:
            if me.workers > 1:
                await self.look_after(me)
            pull = self.penalty(me)
            gradient = await me.gradient()
            me.optimizer_step(gradient if pull is None else gradient + pull)

    async def finish(self, me: Worker) -> None:
        """Continue with averaging rounds until all workers have finished training, then leave the run."""
        state: MpcaState = me.state
        training = me.workers > 1
        while training:
            if state.snapshot is None:
                self._begin(me, state, training=False)
            training = (await me.finished(me.task("round"))).note.training
            state.snapshot = None
        me.leave()

    async def look_after(self, me: Worker) -> None:
        """If an averaging round has ended, use its average and start the next round. Never wait for a round to end."""
        state: MpcaState = me.state
        if state.snapshot is not None and me.task("round").done:
            self.take_in(state, (await me.finished(me.task("round"))).payload)
            state.snapshot = None
        if state.snapshot is None:
            state.begun = me.step
            self._begin(me, state, training=True)

    def _begin(self, me: Worker, state: MpcaState, training: bool) -> None:
        state.snapshot, state.training = copied(me.params), training
        me.background("round", self.round(me, state), "replayed")

    async def round(self, me: Worker, state: MpcaState) -> Message:
        """Average the workers' snapshots over the tree, and find out whether any worker was still training."""
        assert state.snapshot is not None
        total, training = copied(state.snapshot), state.training
        parent, children = family(me.rank, me.workers)
        for child in children:
            heard = await whole(me, "snapshot", child)
            total += heard.payload
            training |= heard.note.training
        if parent is None:
            total /= me.workers
            mean = Message(me.rank, "mean", total, StillTraining(training))
        else:
            me.send(parent, "snapshot", total, StillTraining(training))
            mean = await whole(me, "mean", parent)
        me.send_all(reversed(children), "mean", mean.payload, mean.note)  # the largest subtree first
        return mean

    def take_in(self, state: MpcaState, mean: FlatArray) -> None:
        """Store a new average of snapshots that were taken at step `state.begun`, and compute the average's change per
        step.
        """
        if state.mean is not None and state.begun > state.at:
            state.slope = (mean - state.mean) / (state.begun - state.at)
        state.mean, state.at = mean, state.begun

    def predicted(self, state: MpcaState, step: int) -> FlatArray | None:
        """Return the extrapolated average ŵ at the given step, of shape (K,); None before the first average."""
        if state.mean is None or state.slope is None or not self.gamma:
            return state.mean
        ahead: FlatArray = self.gamma * (step - state.at) * state.slope
        return state.mean + ahead

    def penalty(self, me: Worker) -> FlatArray | None:
        """Return the gradient rho (w - ŵ) of the penalty, of shape (K,); None before the first average or if rho =
        0.
        """
        toward = self.predicted(me.state, me.step) if self.rho else None
        return None if toward is None else self.rho * (me.params - toward)


async def whole(me: Worker, tag: str, source: int) -> Message:
    """Return the next message with the given tag from a worker, and refuse to continue if a message of the worker was
    lost.

    Raises:
        PeerLost: the worker has left or died.
        ProtocolError: one of the worker's messages was lost.
    """
    message = await me.receive(tag, source)
    me.mailbox.require_all(source)
    return message
