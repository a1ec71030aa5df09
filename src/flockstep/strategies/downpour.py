"""Workers step on their own, push what has accrued, and fetch from time to time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from flockstep.arrays.kernels import name_of
from flockstep.arrays.schema import FlatArray, slices
from flockstep.codecs.base import Codec
from flockstep.codecs.identity import Identity
from flockstep.errors import CompositionError, ConfigurationError
from flockstep.expression import SHOWN, searched
from flockstep.messages import Address, Message, Notes, server
from flockstep.nodes import Server, Worker
from flockstep.strategies.access import Held, Pushed
from flockstep.strategies.base import Cell, ResultPolicy, Strategy, Traits
from flockstep.strategies.consistency import Push
from flockstep.strategies.filters.base import Filter
from flockstep.strategies.filters.packet import Inbox, Outbox, check_filters, pack, unpack
from flockstep.strategies.rules.base import Rule
from flockstep.strategies.rules.plain import Plain


@dataclass
class Shard:
    """What a server remembers: for its rule, and of each worker's lists of keys."""

    rule: Any
    inboxes: dict[int, Inbox]


@dataclass
class Replica:
    """What a worker remembers between steps."""

    seen: list[int]
    """For each shard, the version that the worker's parameters stand for: what it fetched, and its pushes since."""
    since: list[int]
    """The same when the first of the accrued gradients was computed."""
    outboxes: list[Outbox]
    accrued: FlatArray
    count: int = 0
    flying: dict[int, int] = field(default_factory=dict)
    """For each shard whose parameters are not in the replica yet, the worker's pushes since it asked for them."""
    fetched: dict[int, Message] = field(default_factory=dict)
    """The parameters of shards that have arrived since the last step."""

    def pushed(self, shard: int) -> None:
        """A sum of gradients goes to that shard."""
        self.seen[shard] += 1
        if shard in self.flying:
            self.flying[shard] += 1

    def place(self, me: Worker, shard: int, fetched: Message) -> None:
        """Replace a shard's part of the replica by what was fetched."""
        me.params[slices(len(me.params), len(self.seen))[shard]] = fetched.payload
        self.seen[shard] = fetched.note.version + self.flying.pop(shard, 0)

    async def collect(self, me: Worker, wait: bool) -> None:
        """Keep the parameters that have arrived by now; `wait` for those still on their way."""
        for message in me.arrived("parameters"):
            self.fetched[server(message.source)] = message  # index to address and back is one formula
        for shard in [shard for shard in self.flying if wait and shard not in self.fetched]:
            self.fetched[shard] = await me.receive("parameters", server(shard))

    async def take(self, me: Worker, wait: bool) -> None:
        """Replace the parts of the replica for which parameters have arrived; `wait` for those still on their way."""
        await self.collect(me, wait)
        for shard in sorted(self.fetched):
            self.place(me, shard, self.fetched.pop(shard))


class Sum(Pushed, frozen=True):
    """Beside a sum of gradients: also how many they are, and whether it asks for the parameters."""

    count: int
    fetch: bool


Request = tuple[Address, FlatArray | None, Sum | None]


@dataclass(frozen=True)
class Downpour(Strategy):
    """Downpour SGD (Dean et al. 2012, section 4.1 and algorithm 7.1).

    A worker steps on its replica with the job's optimizer, adds up its gradients, pushes the sum every `n_push` steps
    and fetches the servers' parameters every `n_fetch`; the paper reports runs with 1 and 1. A server applies a sum of
    m gradients at once, as `rule` says, as m steps' worth along their mean, weight decay included, at the pushing
    worker's learning rate. What is left is pushed at the end, filters aside.

    A fetch travels while the next gradients are computed, as in the paper. What it brings replaces the replica before
    the next step that finds it there, also where gradients are not pushed yet; the next fetch begins when the one
    before is here. With overlap=False it is waited for at once: 1 and 1 is then `asgd`, half as stale.
    Staleness counts the updates by others since the first of the accrued gradients was computed.
    """

    notes: ClassVar[Notes] = {
        "push": Sum,
        "reply to push": Held,
        "reply to fetch": Held,
        "parameters": Held,
    }

    n_push: int = field(default=1, metadata=SHOWN | searched(1, 32))
    n_fetch: int = field(default=1, metadata=SHOWN | searched(1, 32))
    shards: int = 1
    rule: Rule = field(default_factory=Plain)
    filters: tuple[Filter, ...] = ()
    codec: Codec = field(default_factory=Identity)
    overlap: bool = True

    def __post_init__(self) -> None:
        check_filters(self.filters, self.codec)
        if self.rule.compares_reads and (self.overlap or (self.n_push, self.n_fetch) != (1, 1)):
            raise CompositionError(
                f"{self.rule} goes by what workers have read, but gradients of downpour({self.n_push}, {self.n_fetch}, "
                f"overlap={self.overlap}) are computed after steps of the worker's own; use downpour(1, 1, "
                f"overlap=False), or another rule"
            )
        for name in ("n_push", "n_fetch", "shards"):
            if (got := getattr(self, name)) < 1:
                raise ConfigurationError(f"{name} of downpour must be >= 1, got {got}; the usual is 1")

    @property
    def traits(self) -> Traits:
        """Everything arrives, nobody waits for anybody."""
        results: tuple[ResultPolicy, ...] = ("server", "mean", "rank0", "best")
        return Traits(3, survives=True, results=results, server_optimizer=True, memory=self.rule.memory)

    @property
    def cell(self) -> Cell:
        """Gradients go to the servers whenever they are there."""
        return Cell("central", "async", "ad hoc", "distributed PS" if self.shards > 1 else "single PS")

    @property
    def servers(self) -> int:
        """One per shard."""
        return self.shards

    def worker_state(self, me: Worker) -> Replica:
        """Nothing fetched, nothing accrued."""
        return Replica([0] * self.shards, [0] * self.shards, [Outbox() for _ in range(self.shards)], 0 * me.params)

    def master_state(self, me: Server) -> Shard:
        """Nothing heard."""
        return Shard(self.rule.start(me), {rank: Inbox() for rank in range(me.cluster.workers)})

    async def worker(self, me: Worker) -> None:
        """Compute, step, push and fetch when it is time."""
        state: Replica = me.state
        while me.training:
            gradient = await me.gradient()
            state.since = state.since if state.count else list(state.seen)
            state.accrued += gradient
            state.count += 1
            push, fetch = me.step % self.n_push == 0, me.step % self.n_fetch == 0
            await state.take(me, wait=fetch)
            pushes = self._pushes(me, state, fetch) if push else []
            me.optimizer_step(gradient)
            asked = pushes or [(server(i), None, None) for i in range(self.shards) if fetch]
            if fetch and not self.overlap:
                replies = await me.ask_all("push" if push else "fetch", asked)
                for i, reply in enumerate(replies):
                    state.place(me, i, reply)
                continue
            for to, data, note in asked:
                me.send(to, "push" if push else "fetch", data, note)
            if fetch:
                state.flying = dict.fromkeys(range(self.shards), 0)

    async def finish(self, me: Worker) -> None:
        """Wait for what is being fetched; push what has accrued and what filters withheld."""
        state: Replica = me.state
        await state.collect(me, wait=True)
        if state.count or any(outbox.pending is not None for outbox in state.outboxes):
            for to, data, note in self._pushes(me, state, flush=True):
                me.send(to, "push", data, note)
        me.leave()

    async def master(self, me: Server) -> None:
        """Apply at once; answer with the parameters."""
        state: Shard = me.state
        async for message in me.messages():
            if message.tag == "push":
                self._push(me, state, message)
            if message.tag == "fetch" or (message.tag == "push" and message.note.fetch):
                self.rule.read(me, state.rule, message.source)
                if self.overlap:
                    me.send(message.source, "parameters", me.params, Held(me.version))
                else:
                    me.reply(message, me.params, Held(me.version))

    def _push(self, me: Server, state: Shard, message: Message) -> None:
        note, rank, dtype = message.note, message.source, name_of(me.params)
        total = unpack(self.filters, self.codec, message.payload, len(me.params), dtype, state.inboxes[rank])
        count = note.count
        steps = max(1, count)
        mean = total if steps == 1 else total / steps
        push = Push(rank, message.step - 1, note.version, note.lr, mean)
        late, [weight] = me.version - push.version, self.rule.apply(me, state.rule, [push], steps)
        if count:
            me.record_update(rank, late, count, weight / count)

    def _pushes(self, me: Worker, state: Replica, fetch: bool = False, flush: bool = False) -> list[Request]:
        """What each shard is sent; `fetch`: and answers with its parameters; `flush`: filters aside."""
        pushes: list[Request] = []
        for i, part in enumerate(slices(len(me.params), self.shards)):
            update, outbox = state.accrued[part], state.outboxes[i]
            data = pack(self.filters, self.codec, update, me.params[part], outbox, me.random, flush)
            pushes.append((server(i), data, Sum(state.since[i], me.lr, state.count, fetch)))
            state.pushed(i)
        state.accrued[:], state.count = 0, 0
        return pushes
