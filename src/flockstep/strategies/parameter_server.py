"""Workers push gradients to servers and are answered with parameters; a consistency rule says who waits."""

from __future__ import annotations

from dataclasses import dataclass, field

from flockstep.arrays.schema import FlatArray, slices
from flockstep.codecs.base import Codec
from flockstep.codecs.identity import Identity
from flockstep.errors import CompositionError, ConfigurationError
from flockstep.expression import SHOWN
from flockstep.feedback.base import Feedback
from flockstep.feedback.nothing import NoFeedback
from flockstep.feedback.sender import check_composition
from flockstep.messages import Address, Fields, Message, server
from flockstep.nodes import Server, Worker
from flockstep.strategies.base import Cell, Clips, Exchange, ResultPolicy, Scheduling, Strategy, Traits
from flockstep.strategies.consistency import BulkSynchronous, Consistency
from flockstep.strategies.encoding import decoded, encoded
from flockstep.strategies.filters.base import Filter
from flockstep.strategies.filters.packet import Inbox, Outbox, check_filters, pack, unpack
from flockstep.strategies.late_workers import gradient_unless_late, push_and_take
from flockstep.strategies.push_server import PushServer
from flockstep.strategies.rules.base import Rule
from flockstep.strategies.rules.plain import Plain
from flockstep.strategies.server_state import PushState, ServerState
from flockstep.strategies.worker_copies import push_and_keep, renew


@dataclass(frozen=True)
class ParameterServer(Strategy):
    """Parameter server (Dean et al. 2012; Li et al. 2014), cut into `shards` servers.

    A worker computes g at the w it has read, pushes g, and reads again: unless `consistency` has workers keep copies,
    the push asks for the parameters too, and is answered when the read is admitted. A server applies what `consistency`
    releases, as `rule` says, with the optimiser of the job rebuilt on the server. The staleness of a gradient is the
    number of updates between the version it was computed on and the one it is applied to (Zhang et al. 2016). Shards
    decide independently of each other. `filters` choose the entries that travel; others go with a later push.
    """

    consistency: Consistency = field(default_factory=BulkSynchronous, metadata=SHOWN)
    shards: int = 1
    codec: Codec = field(default_factory=Identity)
    feedback: Feedback = field(default_factory=NoFeedback)
    rule: Rule = field(default_factory=Plain)
    filters: tuple[Filter, ...] = ()

    def __post_init__(self) -> None:
        if self.shards < 1:
            raise ConfigurationError(f"shards must be >= 1, got {self.shards}; 1 is a single server")
        if self.shards > 1 and self.consistency.gives_up:
            raise CompositionError(
                f"with {self.consistency} workers give up gradients, on which shards that decide by themselves cannot "
                f"agree; got shards={self.shards}, use shards=1"
            )
        if self.consistency.keeps_copies and self.rule.compares_reads:
            raise CompositionError(
                f"{self.rule} goes by what workers have read, unknown to servers with {self.consistency}: a copy "
                "and steps of one's own; use a consistency without copies, such as ssp, or another rule"
            )
        if self.filters and (self.consistency.gives_up or not isinstance(self.feedback, NoFeedback)):
            raise CompositionError(
                "filters keep what they withhold, for a push that is certain: they go without feedback, and without a "
                f"rule that gives up gradients, got {self.feedback} and {self.consistency}; leave one out"
            )
        check_filters(self.filters, self.codec)
        check_composition(self.codec, self.feedback)

    @property
    def traits(self) -> Traits:
        """As the consistency rule promises."""
        own, ends = self.consistency, any(each.carries for each in self.filters)  # a last push must be known as such
        results: tuple[ResultPolicy, ...] = ("server", "mean", "rank0", "best")
        clips: Clips = "own" if own.completeness in (2, 3) else self.rule.clips if self.shards == 1 else "none"
        chosen = own.completeness, own.survives, results, True, True, ends, own.gathers, own.least
        return Traits(*chosen, "own", clips, self.rule.memory)

    @property
    def cell(self) -> Cell:
        """As the consistency rule schedules; one that drops late gradients still has everyone on the same version."""
        scheduling: dict[int, Scheduling] = {1: "sync", 2: "bounded async", 3: "async", 4: "sync"}
        when = scheduling[self.consistency.completeness]
        eager = self.consistency.eager
        how: Exchange = "reduce" if when == "sync" else "ad hoc with eager scatter" if eager else "ad hoc"
        return Cell("central", when, how, "distributed PS" if self.shards > 1 else "single PS")

    @property
    def servers(self) -> int:
        """One per shard."""
        return self.shards

    def check(self, workers: int) -> None:
        """The rule must make sense for so many workers."""
        self.consistency.check(workers)

    def worker_state(self, me: Worker) -> PushState:
        """Nothing read, nothing dropped."""
        each = range(self.shards)
        return PushState([0] * self.shards, [None] * self.shards, [Outbox() for _ in each], [0] * self.shards)

    def master_state(self, me: Server) -> ServerState:
        """Everyone computes on version 0."""
        return PushServer(self.consistency, self.rule, self.decode).start(me)

    async def worker(self, me: Worker) -> None:
        """Compute, push, take the parameters that come back; or those that come by themselves."""
        state: PushState = me.state
        parts = slices(len(me.params), self.shards)
        while me.training:
            gives_up = self.consistency.gives_up
            gradient = await (gradient_unless_late(me, state) if gives_up else me.gradient())
            if gradient is None:
                continue
            pushes: list[tuple[Address, FlatArray, Fields]] = []
            for i, part in enumerate(parts):
                data = self._encoded(me, state, i, gradient, part)
                pushes.append((server(i), data, {"version": state.versions[i], "lr": me.lr}))
            if self.consistency.keeps_copies:
                await push_and_keep(me, state, pushes, gradient, self.consistency)
                continue
            if gives_up:
                await push_and_take(me, state, pushes)
                continue
            for i, reply in enumerate(await me.ask_all("push", pushes)):
                me.params[parts[i]] = reply.payload
                state.versions[i] = int(reply.note["version"])

    async def finish(self, me: Worker) -> None:
        """Where servers send by themselves, take what they send last; leave."""
        if self.consistency.eager:
            await renew(me, me.state, self.consistency, me.step)
        await super().finish(me)

    def _encoded(self, me: Worker, state: PushState, i: int, gradient: FlatArray, part: slice) -> FlatArray:
        piece, params = gradient[part], me.params[part]
        if self.filters:
            return pack(self.filters, self.codec, piece, params, state.outboxes[i], me.random, flush=not me.training)
        data, state.errors[i] = encoded(me, self.codec, self.feedback, piece, state.errors[i], part)
        return data

    async def master(self, me: Server) -> None:
        """Collect, apply what is released, answer who is admitted; in the end apply what is left."""
        await PushServer(self.consistency, self.rule, self.decode).serve(me)

    def decode(self, me: Server, message: Message) -> FlatArray:
        """The gradient (K,) that a push stands for."""
        if not self.filters:
            return decoded(me, self.codec, self.feedback, message)
        inbox = me.state.inboxes.setdefault(message.source, Inbox())
        return unpack(self.filters, self.codec, message.payload, len(me.params), me.params.dtype.name, inbox)
