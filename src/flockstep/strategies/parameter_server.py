"""Parameter server: workers push gradients and read parameters; a consistency rule decides which workers wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from flockstep.arrays.kernels import name_of
from flockstep.arrays.namespace import copied
from flockstep.arrays.schema import FlatArray, slices
from flockstep.codecs.base import Codec
from flockstep.codecs.identity import Identity
from flockstep.errors import CompositionError, PeerLost, ProtocolError, require
from flockstep.expression import SHOWN
from flockstep.feedback.base import Feedback
from flockstep.feedback.nothing import NoFeedback
from flockstep.feedback.sender import check_composition
from flockstep.messages import LEAVE, Address, Message, Notes, node_name
from flockstep.nodes import Server, Worker
from flockstep.strategies.access import (
    Access,
    CachedCopies,
    CancelStale,
    EagerCopies,
    Fresh,
    ParameterVersion,
    Pushed,
    PushedStep,
)
from flockstep.strategies.aggregations import Aggregation, Mean
from flockstep.strategies.aggregations.requirements import check_slices
from flockstep.strategies.base import (
    Clips,
    Exchange,
    ResultPolicy,
    Scheduling,
    Strategy,
    TaxonomyEntry,
    Traits,
    check_replicas,
)
from flockstep.strategies.consistency import BulkSynchronous, Consistency, ConsistencyView, Push, Read
from flockstep.strategies.encoding import decoded, encoded
from flockstep.strategies.filters.base import Filter
from flockstep.strategies.filters.packet import Inbox, Outbox, check_filters, pack, unpack
from flockstep.strategies.finite import accepted
from flockstep.strategies.resizing import Resizing
from flockstep.strategies.server_state import PushState, ServerState, without
from flockstep.strategies.server_updates.base import ServerUpdate
from flockstep.strategies.server_updates.plain import Plain
from flockstep.strategies.traits import Delivery


@dataclass(frozen=True)
class ParameterServer(Strategy):
    """Parameter server (Dean et al. 2012; Li et al. 2014), divided over `shards` servers.

    A worker computes the gradient g with the parameters that it has read, pushes g, and reads again. How a worker reads
    depends on the access mode of `consistency`: in most modes the push also requests the parameters, and is answered
    when the read is admitted. A server applies the gradients that `consistency` releases, with `server_update` and the
    job's optimizer, rebuilt on the server. The staleness of a gradient is the number of updates between the version
    with which the gradient was computed and the version to which it is applied (Zhang et al. 2016). Shards decide
    independently of each other. `filters` select the entries that are sent; the other entries are added to a later
    push. An `aggregation` other than `mean` takes the place of the mean of a step's gradients. If so many workers are
    missing in a step that the aggregation could not withstand the attackers for which it is configured, none of the
    step's gradients is applied. `replicas` is the number of backups of each server, one of which takes the place of a
    server that dies.
    """

    checks: ClassVar[frozenset[str]] = frozenset({"push"})
    notes: ClassVar[Notes] = {"push": Pushed, "reply to push": ParameterVersion, "reply to read": Fresh, "fresh": Fresh}

    consistency: Consistency = field(default_factory=BulkSynchronous, metadata=SHOWN)
    shards: int = 1
    codec: Codec = field(default_factory=Identity)
    feedback: Feedback = field(default_factory=NoFeedback)
    server_update: ServerUpdate = field(default_factory=Plain)
    filters: tuple[Filter, ...] = ()
    aggregation: Aggregation = field(default_factory=Mean)
    replicas: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_replicas(self.replicas)
        require(self.shards >= 1, "shards", ">= 1", self.shards, "use 1 for a single server")
        access = self.consistency.access
        if self.shards > 1 and isinstance(access, CancelStale):
            raise CompositionError(
                f"with {self.consistency} servers drop gradients, and shards decide separately which gradients to "
                f"drop; got shards={self.shards}, use shards=1"
            )
        if isinstance(access, CachedCopies) and self.server_update.compares_reads:
            raise CompositionError(
                f"{self.server_update} needs the parameters that workers have read, which servers do not know with "
                f"{self.consistency}, because workers update their own copies; use a consistency without copies, such "
                "as ssp, or another server_update"
            )
        if self.filters and (isinstance(access, CancelStale) or not isinstance(self.feedback, NoFeedback)):
            raise CompositionError(
                "filters send withheld elements in a later push, so filters need feedback none and a consistency "
                f"that drops no gradients, got {self.feedback} and {self.consistency}; leave out the filters, or "
                "change one of these"
            )
        if not self.aggregation.linear:
            self._check_aggregation()
        check_filters(self.filters, self.codec)
        check_composition(self.codec, self.feedback)

    def _check_aggregation(self) -> None:
        own, rule = self.aggregation, self.consistency
        if not rule.one_each:
            raise CompositionError(
                f"{own} compares one gradient from each worker, but a step of {rule} may include fewer gradients, or "
                "several from one worker; use consistency=bsp, backup, k_sync or k_async, or aggregation=mean"
            )
        if self.server_update.weighs:
            raise CompositionError(
                f"{self.server_update} weights the gradients of a step, which {own} combines without weights; use "
                "server_update=plain, or aggregation=mean"
            )
        if self.filters:
            raise CompositionError(
                f"{own} compares whole gradients, but filters withhold elements; leave out the filters, or use "
                "aggregation=mean"
            )
        check_slices(own, self.codec, self.shards)

    @cached_property
    def _access(self) -> Access:
        return self.consistency.access

    @cached_property
    def _exact(self) -> bool:
        """Whether gradients are sent unchanged: no codec, no feedback, no filters."""
        return self.codec == Identity() and self.feedback == NoFeedback() and not self.filters

    @property
    def traits(self) -> Traits:
        own, ends = (
            self.consistency,
            any(each.carries for each in self.filters),
        )  # the server must recognize a last push
        results: tuple[ResultPolicy, ...] = ("server", "mean", "rank0", "best")
        clips: Clips = (
            "own"
            if own.delivery in ("bounded delay", "unbounded delay")
            else self.server_update.clips
            if self.shards == 1
            else "none"
        )
        chosen = own.delivery, own.survives, results, True, True, ends, own.gathers, own.least
        plain = not isinstance(self._access, CancelStale)
        return Traits(*chosen, "own", clips, self.server_update.memory, plain_gradients=plain, own_rates=own.alone)

    @property
    def taxonomy_entry(self) -> TaxonomyEntry:
        """The strategy's taxonomy entry, which follows from the class of the consistency rule. A rule that drops late
        gradients counts as synchronous, because all workers use one version.
        """
        scheduling: dict[Delivery, Scheduling] = {
            "synchronous": "sync",
            "bounded delay": "bounded async",
            "unbounded delay": "async",
            "partial": "sync",
        }
        when = scheduling[self.consistency.delivery]
        eager: Exchange = "ad hoc with eager scatter" if isinstance(self._access, EagerCopies) else "ad hoc"
        how: Exchange = "reduce" if when == "sync" else eager
        return TaxonomyEntry("central", when, how, "distributed PS" if self.shards > 1 else "single PS")

    @property
    def servers(self) -> int:
        return self.shards

    def most_stale(self, workers: int) -> int | None:
        return self.consistency.most_stale(workers)

    def check(self, workers: int) -> None:
        self.consistency.check(workers)
        self.aggregation.check(self.consistency.full_step(workers))

    resizing = Resizing(own=("errors",), server=("combined",))

    def worker_state(self, me: Worker) -> PushState:
        each = range(self.shards)
        return PushState([0] * self.shards, [None] * self.shards, [Outbox() for _ in each], [0] * self.shards)

    def master_state(self, me: Server) -> ServerState:
        """Return the server's initial state, in which every worker computes with version 0 of the parameters."""
        ranks = range(me.cluster.workers)
        return ServerState(
            dict.fromkeys(ranks, 0),
            update_state=self.server_update.start(me),
            reading=dict.fromkeys(ranks, 0),
            kept={0: copied(me.params)} if self.consistency.compares_versions else {},
        )

    async def worker(self, me: Worker) -> None:
        state: PushState = me.state
        parts = dict(zip(me.server_addresses, slices(len(me.params), self.shards), strict=True))
        full_step = self.consistency.full_step(me.workers)
        while me.training:
            gradient = await self._access.gradient(me, state)
            if gradient is not None:
                step = PushedStep(parts, self.pushes(me, state, gradient, parts), gradient, full_step)
                await self._access.exchange(me, state, step)

    async def finish(self, me: Worker) -> None:
        await self._access.finish(me, me.state)
        await super().finish(me)

    def pushes(
        self, me: Worker, state: PushState, gradient: FlatArray, parts: Mapping[Address, slice]
    ) -> list[tuple[Address, FlatArray, Pushed]]:
        """Return the worker's push to each shard: the shard's address, the array and the note."""
        pushes, lr = [], me.lr
        for i, (to, part) in enumerate(parts.items()):
            data = gradient[part] if self._exact else self._encoded(me, state, i, gradient, part)
            pushes.append((to, data, Pushed(state.versions[i], lr)))
        return pushes

    def _encoded(self, me: Worker, state: PushState, i: int, gradient: FlatArray, part: slice) -> FlatArray:
        piece, params = gradient[part], me.params[part]
        if self.filters:
            return pack(self.filters, self.codec, piece, params, state.outboxes[i], me.random, flush=not me.has_steps)
        data, state.errors[i] = encoded(me, self.codec, self.feedback, piece, state.errors[i], part)
        return data

    def decode(self, me: Server, message: Message) -> FlatArray:
        """Return the gradient (K,) that a push contains, or zeros in its place if the gradient is refused.

        Raises:
            Diverged: the gradient is not finite or too large, and the settings say that a bad gradient ends the run.
            ProtocolError: the push has the wrong size or cannot be decoded.
        """
        if self._exact:
            gradient = message.payload
            if len(gradient) != len(me.params) or gradient.dtype != me.params.dtype:
                raise ProtocolError(
                    f"{node_name(message.source)} pushed {len(gradient)} elements of {gradient.dtype} to "
                    f"{node_name(me.address)}, which holds {len(me.params)} elements of {me.params.dtype}"
                )
            return accepted(me, message, gradient)
        if self.filters:
            inbox, dtype = me.state.inboxes.setdefault(message.source, Inbox()), name_of(me.params)
            gradient = unpack(self.filters, self.codec, message.payload, len(me.params), dtype, inbox)
        else:
            gradient = decoded(me, self.codec, self.feedback, message)
        return accepted(me, message, gradient)

    async def master(self, me: Server) -> None:
        """Collect pushes, apply the gradients that the consistency rule releases, and answer the reads that the rule
        admits. At the end, apply the remaining gradients.
        """
        state: ServerState = me.state
        state.reopen(me.version, me.departed)
        async for message in me.messages():
            if message.source in me.lost and message.tag != LEAVE:
                continue  # sent before its worker was lost, whose clock no longer counts
            if message.tag == "push":
                self._push(me, state, message)
            elif message.tag == "read":
                state.reads.append(Read(message.source, message.step, 0, message))
                self._settle(me, state, moved=False)
            elif message.tag == LEAVE:
                moved = state.depart(message.source, lost=bool(message.note.get("lost")))
                self._settle(me, state, moved, left=True)
        for group in self.consistency.flushed(state.pushes, self._view(me, state, moved=True)):
            self._apply(me, state, group)

    def _push(self, me: Server, state: ServerState, message: Message) -> None:
        gradient = self.decode(me, message)
        rank, clock, version = message.source, message.step, message.note.version
        state.pushes.append(Push(rank, clock - 1, version, message.note.lr, gradient))
        moved = state.advance(rank, clock)
        self._access.pushed(me, state, Read(rank, clock, version, message))
        self._settle(me, state, moved)

    def _settle(self, me: Server, state: ServerState, moved: bool, left: bool = False) -> None:
        """Apply the gradients that the rule releases now, and answer the reads that it admits now."""
        own, view = self.consistency, self._view(me, state, moved or left)
        for group in own.released(state.pushes, view):
            self._apply(me, state, group)
            view.version = me.version
        if dropped := own.dropped(state.pushes, view):
            state.pushes = without(state.pushes, dropped)
        if admitted := own.admitted(state.reads, view):
            state.reads = without(state.reads, admitted)
        for rank in self._access.answer(me, state, admitted, moved):
            if self.server_update.compares_reads:
                self.server_update.read(me, state.update_state, rank)
            state.reading[rank] = me.version

    def _view(self, me: Server, state: ServerState, moved: bool) -> ConsistencyView:
        return ConsistencyView(
            state.slowest,
            me.cluster.workers,
            len(state.clocks) - len(state.done),
            len(me.lost),
            me.version,
            state.reading,
            me.params,
            state.kept,
            moved,
            state.waits,
        )

    def _apply(self, me: Server, state: ServerState, group: list[Push]) -> None:
        workers, before = me.cluster.workers, me.version
        full = self.consistency.full_step(workers)
        if self.aggregation.linear:
            weights: list[float] | None = self.server_update.apply(me, state.update_state, group, len(group) / full)
        elif len(group) < self.aggregation.least(full):
            weights = self._skip(me, group, full)
        else:
            weights = self._combine(me, state, group, len(group) / full)
        for i, push in enumerate(group):
            me.record_update(push.rank, before - push.version, weight=None if weights is None else weights[i])
        state.pushes = without(state.pushes, group)
        if self.consistency.compares_versions:
            state.kept[me.version] = copied(me.params)

    def _combine(self, me: Server, state: ServerState, group: list[Push], share: float) -> list[float] | None:
        """Apply the group's gradients, combined by the aggregation; return the weight of each if it has one."""
        weights: list[float] | None = None

        def combine(gradients: Sequence[FlatArray]) -> FlatArray:
            nonlocal weights
            vector, coefficients = self.aggregation.combine(gradients, state.combined)
            weights = None if coefficients is None else [share * c for c in coefficients]
            if self.aggregation.remembers:
                state.combined = vector
            return vector

        self.server_update.apply(me, state.update_state, group, share, combine)
        return weights

    def _skip(self, me: Server, group: list[Push], full: int) -> list[float]:
        """Make a version without a step, because a group has too few gradients for the aggregation.

        Raises:
            PeerLost: too many workers died for any later step.
        """
        least, workers = self.aggregation.least(full), me.cluster.workers
        if workers - len(me.lost) < least:
            raise PeerLost(
                f"{len(me.lost)} of {workers} workers are lost, and {self.aggregation} needs the gradients of {least}; "
                "use more workers, or an aggregation for fewer attackers"
            )
        me.version += 1
        return [0.0] * len(group)
