"""Sandblaster: L-BFGS with a coordinator that divides the data into many small portions, which workers process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from flockstep.arrays.kernels import name_of
from flockstep.arrays.namespace import cast, copied, zeros
from flockstep.arrays.schema import FlatArray, slices
from flockstep.errors import ConfigurationError
from flockstep.messages import MASTER, Message, Notes, server
from flockstep.nodes import Server, Worker
from flockstep.strategies.base import Strategy, TaxonomyEntry, Traits, check_replicas
from flockstep.strategies.coordinator import Coordinator, PortionAssignment, Portions, Report
from flockstep.strategies.vector_shards import ASK, VectorReply, VectorRequest, VectorShard


@dataclass
class ShardState:
    """A server's state: its slices of the vectors, and its part of the evaluation in progress.

    Portions are added in order of their number, whatever the order of arrival; portions that arrive early wait in
    `early`.
    """

    shard: VectorShard
    evaluation: int = -1
    added: int = 0
    early: dict[int, FlatArray] = field(default_factory=dict)
    coordinator: Coordinator | None = None


@dataclass
class Fetched:
    """A worker's state: the number of the evaluation whose parameters the worker has fetched."""

    evaluation: int = -1


@dataclass(frozen=True)
class Sandblaster(Strategy):
    """Sandblaster L-BFGS (Dean et al. 2012, section 4.2), on `shards` servers, the first of which coordinates.

    An evaluation computes loss and gradient over the whole training set, cut into `portions` that are assigned to
    workers as they become idle. If no portion is left, idle workers repeat the portions that were assigned longest ago,
    with at most `backups` repetitions of each portion; the first result counts. Gradients go to the shards, which hold
    the last `history` pairs and execute the coordinator's commands (dot, add, scale). The search direction comes from
    the two-loop recursion, and the step is halved until Armijo's condition holds. The gradient of a portion counts as
    one step of its worker; how many portions a worker takes depends on its speed, and training ends when the workers
    together have taken the steps granted to them. `replicas` is the number of backups of each shard.
    """

    notes: ClassVar[Notes] = {
        "work": Report,
        "reply to work": PortionAssignment,
        ASK: VectorRequest,
        f"reply to {ASK}": VectorReply,
    }

    portions: int = 16
    backups: int = 1
    history: int = 10
    shards: int = 1
    replicas: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_replicas(self.replicas)
        for name, least in (("portions", 1), ("backups", 0), ("history", 1), ("shards", 1)):
            if getattr(self, name) < least:
                raise ConfigurationError(
                    f"{name} must be >= {least}, got {getattr(self, name)}; flockstep list sandblaster shows "
                    "usual values"
                )

    # One exact gradient at a time; any worker can take any portion, including that of a dead worker.
    traits = Traits(
        "synchronous",
        True,
        ("server",),
        needs_job=True,
        fixed_steps=False,
        samples="others",
        curvature=True,
        checkpoints=False,
        plain_gradients=False,
    )

    @property
    def taxonomy_entry(self) -> TaxonomyEntry:
        return TaxonomyEntry("central", "sync", "ad hoc", "single PS" if self.shards == 1 else "distributed PS")

    @property
    def servers(self) -> int:
        return self.shards

    def worker_state(self, me: Worker) -> Fetched:
        """Return the state of a worker before the first fetch.

        Raises:
            ConfigurationError: there are more portions than training samples.
        """
        if self.portions > (most := me.train_size):
            raise ConfigurationError(
                f"portions must be <= {most}, the number of training samples, got {self.portions}; use fewer portions"
            )
        return Fetched()

    def master_state(self, me: Server) -> ShardState:
        """Return a server's initial state: its vectors and an empty L-BFGS history; the first server's state also holds
        the coordinator.
        """
        start = cast(me.params, "float64")
        vectors = {"w": start, "trial": copied(start), "sum": zeros(start, len(start)), "g": zeros(start, len(start))}
        coordinator = Coordinator(Portions(self.portions, self.backups), self.history) if me.address == MASTER else None
        return ShardState(VectorShard(vectors), coordinator=coordinator)

    async def worker(self, me: Worker) -> None:
        """Request portions until none is left; for each, fetch new parameters if needed, compute the gradient, push it
        to the shards, and report the loss.
        """
        state: Fetched = me.state
        parts = slices(len(me.params), self.shards)
        report = Report(budget=me.steps or 0, size=me.train_size)
        while True:
            work = (await me.ask(MASTER, "work", None, report)).note
            if work.evaluation != state.evaluation:
                asked = [(server(i), None, VectorRequest("fetch")) for i in range(self.shards)]
                for part, reply in zip(parts, await me.ask_all(ASK, asked), strict=True):
                    me.params[part] = reply.payload
                state.evaluation = work.evaluation
            if work.portion < 0:
                return
            gradient = (await me.gradient_over(work.start, work.stop)) * (work.stop - work.start)
            key = VectorRequest("portion", evaluation=work.evaluation, portion=work.portion)
            await me.ask_all(ASK, [(server(i), gradient[part], key) for i, part in enumerate(parts)])
            report = Report(work.evaluation, work.portion, me.loss * (work.stop - work.start))

    async def master(self, me: Server) -> None:
        """Serve the server's shard of the vectors in the background; on the first server, also run the coordinator."""
        state: ShardState = me.state
        me.background("shard", _serve(me, state), again="afresh")
        if state.coordinator is not None:
            await state.coordinator.run(me)
            return
        async for _ in me.messages():
            pass


async def _serve(me: Server, state: ShardState) -> None:
    """Answer fetches, add up the gradients of portions, and execute commands."""
    vectors = state.shard.vectors
    while True:
        message = await me.receive("ask")
        if message.note.op == "fetch":
            me.reply(message, cast(vectors["trial"], name_of(me.params)), VectorReply())
        elif message.note.op == "portion":
            _add(state, message)
            me.reply(message, None, VectorReply())
        else:
            me.reply(message, None, VectorReply(state.shard.answer(message.note)))
            me.params[:] = vectors["w"]


def _add(state: ShardState, message: Message) -> None:
    """Add a portion's gradient, unless it belongs to an earlier evaluation or has been added already."""
    evaluation, portion = message.note.evaluation, message.note.portion
    if evaluation > state.evaluation:
        state.evaluation, state.added, state.early = evaluation, 0, {}
        state.shard.vectors["sum"] = zeros(state.shard.vectors["w"], len(state.shard.vectors["w"]))
    if evaluation == state.evaluation and portion >= state.added:
        state.early[portion] = message.payload
    while state.added in state.early:
        state.shard.vectors["sum"] = state.shard.vectors["sum"] + state.early.pop(state.added)
        state.added += 1
