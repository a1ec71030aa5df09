"""Workers push gradients to servers and are answered with parameters; a consistency rule says who waits."""

from __future__ import annotations

from dataclasses import dataclass, field

from flockstep.arrays.schema import FlatArray, slices
from flockstep.codecs.base import Codec
from flockstep.codecs.identity import Identity
from flockstep.errors import ConfigurationError
from flockstep.expression import SHOWN
from flockstep.feedback.base import Feedback
from flockstep.feedback.nothing import NoFeedback
from flockstep.feedback.sender import check_composition, encode
from flockstep.messages import BYE, Address, Message, Note, server
from flockstep.nodes import Server, Worker
from flockstep.strategies.base import Cell, Exchange, Scheduling, Strategy, Traits
from flockstep.strategies.consistency import BulkSynchronous, Consistency, Push
from flockstep.strategies.rules.base import Rule
from flockstep.strategies.rules.plain import Plain
from flockstep.strategies.server_state import PushState, ServerState


@dataclass(frozen=True)
class ParameterServer(Strategy):
    """Parameter server (Dean et al. 2012; Li et al. 2014), cut into `shards` servers.

    A worker computes g at the w it has read, pushes g, and reads again: the push asks for the parameters too, and is
    answered when `consistency` admits the read. A server applies what `consistency` releases, as `rule` says, with the
    optimiser of the job rebuilt on the server. The staleness of a gradient is the number of updates between the version
    it was computed on and the one it is applied to (Zhang et al. 2016). Shards decide independently of each other.
    """

    consistency: Consistency = field(default_factory=BulkSynchronous, metadata=SHOWN)
    shards: int = 1
    codec: Codec = field(default_factory=Identity)
    feedback: Feedback = field(default_factory=NoFeedback)
    rule: Rule = field(default_factory=Plain)

    def __post_init__(self) -> None:
        if self.shards < 1:
            raise ConfigurationError(f"shards must be >= 1, got {self.shards}; 1 is a single server")
        check_composition(self.codec, self.feedback)

    @property
    def traits(self) -> Traits:
        """As the consistency rule promises."""
        rule = self.consistency
        return Traits(rule.completeness, rule.survives, ("server", "mean", "rank0", "best"), server_optimizer=True)

    @property
    def cell(self) -> Cell:
        """As the consistency rule schedules."""
        scheduling: dict[int, Scheduling] = {1: "sync", 2: "bounded async", 3: "async"}
        when = scheduling[self.consistency.completeness]
        how: Exchange = "reduce" if when == "sync" else "ad hoc"
        return Cell("central", when, how, "distributed PS" if self.shards > 1 else "single PS")

    @property
    def servers(self) -> int:
        """One per shard."""
        return self.shards

    def worker_state(self, me: Worker) -> PushState:
        """Nothing read, nothing dropped."""
        return PushState([0] * self.shards, [None] * self.shards)

    def master_state(self, me: Server) -> ServerState:
        """Everyone at clock 0."""
        return ServerState(dict.fromkeys(range(me.cluster.workers), 0), rule=self.rule.start(me))

    async def worker(self, me: Worker) -> None:
        """Compute, push, take the parameters that come back."""
        state: PushState = me.state
        parts = slices(len(me.params), self.shards)
        while me.training:
            gradient = await me.gradient()
            pushes: list[tuple[Address, FlatArray, Note]] = []
            for i, part in enumerate(parts):
                data, state.errors[i] = encode(self.codec, self.feedback, gradient[part], state.errors[i], me.random)
                pushes.append((server(i), data, {"version": state.versions[i], "lr": me.lr}))
            for i, reply in enumerate(await me.ask_all("push", pushes)):
                me.params[parts[i]] = reply.payload
                state.versions[i] = int(reply.note["version"])

    async def master(self, me: Server) -> None:
        """Collect, apply what is released, answer who is admitted."""
        state: ServerState = me.state
        async for message in me.messages():
            if message.tag == "push":
                self._push(me, state, message)
            elif message.tag == BYE and message.note.get("lost") and state.advance(message.source, None):
                self._apply(me, state, state.pushes)
                self._answer(me, state, state.reads)

    def _push(self, me: Server, state: ServerState, message: Message) -> None:
        push = self._received(me, message)
        state.pushes.append(push)
        state.reads.append(message)
        # The rule looks at clocks alone: while the slowest stands still, nothing changes for those that wait already.
        moved = state.advance(message.source, message.step)
        self._apply(me, state, state.pushes if moved else [push])
        self._answer(me, state, state.reads if moved else [message])

    def _received(self, me: Server, message: Message) -> Push:
        gradient = self.codec.decode(message.payload, len(me.params), me.params.dtype.name)
        note = message.note
        return Push(message.source, message.step - 1, int(note["version"]), float(note["lr"]), gradient)

    def _apply(self, me: Server, state: ServerState, pushes: list[Push]) -> None:
        for group in self.consistency.releases(pushes, state.slowest):
            for push in group:
                me.record_update(push.rank, me.version - push.version)
            self.rule.apply(me, state.rule, group)
            taken = set(map(id, group))
            state.pushes = [push for push in state.pushes if id(push) not in taken]

    def _answer(self, me: Server, state: ServerState, reads: list[Message]) -> None:
        admitted = [read for read in reads if self.consistency.admits(read.step, state.slowest)]
        if admitted:
            answered = set(map(id, admitted))
            state.reads = [read for read in state.reads if id(read) not in answered]
            for read in admitted:
                self.rule.read(me, state.rule, read.source)
            me.reply_all(admitted, me.params, {"version": me.version})
