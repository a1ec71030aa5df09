"""Downpour SGD: workers step independently, push accumulated gradients, and fetch parameters from time to time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from flockstep.arrays.kernels import name_of
from flockstep.arrays.schema import FlatArray, slices
from flockstep.codecs.base import Codec
from flockstep.codecs.identity import Identity
from flockstep.errors import CompositionError, require
from flockstep.expression import SHOWN
from flockstep.messages import Address, Message, Notes, server
from flockstep.nodes import Server, Worker
from flockstep.strategies.access import ParameterVersion, Pushed
from flockstep.strategies.base import ResultPolicy, Strategy, TaxonomyEntry, Traits, check_replicas
from flockstep.strategies.consistency import Push
from flockstep.strategies.filters.base import Filter
from flockstep.strategies.filters.packet import Inbox, Outbox, check_filters, pack, unpack
from flockstep.strategies.server_updates.base import ServerUpdate
from flockstep.strategies.server_updates.plain import Plain


@dataclass
class DownpourServerState:
    """A server's state: the memory of its update rule, and the key lists of each worker."""

    update_state: Any
    inboxes: dict[int, Inbox]


@dataclass
class DownpourState:
    """A Downpour worker's state between steps."""

    seen: list[int]
    """For each shard, the version of the worker's parameters: the fetched version plus the worker's own pushes since
    then.
    """
    since: list[int]
    """For each shard, the version of the worker's parameters with which the first of the accumulated gradients was
    computed.
    """
    outboxes: list[Outbox]
    accrued: FlatArray
    count: int = 0
    flying: dict[int, int] = field(default_factory=dict)
    """For each shard with a fetch in transit, the number of the worker's pushes since the fetch was sent."""
    fetched: dict[int, Message] = field(default_factory=dict)
    """Shard → the parameters that have arrived since the last step."""

    def pushed(self, shard: int) -> None:
        """Count a push to shard `i`."""
        self.seen[shard] += 1
        if shard in self.flying:
            self.flying[shard] += 1

    def place(self, me: Worker, shard: int, fetched: Message) -> None:
        """Replace the shard's slice of the replica with the fetched parameters."""
        me.params[slices(len(me.params), len(self.seen))[shard]] = fetched.payload
        self.seen[shard] = fetched.note.version + self.flying.pop(shard, 0)

    async def collect(self, me: Worker, wait: bool) -> None:
        """Store the parameters that have arrived; if `wait`, first wait for all fetches in transit."""
        for message in me.arrived("parameters"):
            self.fetched[server(message.source)] = message  # the same formula maps an index to an address and back
        for shard in [shard for shard in self.flying if wait and shard not in self.fetched]:
            self.fetched[shard] = await me.receive("parameters", server(shard))

    async def take(self, me: Worker, wait: bool) -> None:
        """Replace the slices of the replica whose fetched parameters have arrived; if `wait`, first wait for all
        fetches in transit.
        """
        await self.collect(me, wait)
        for shard in sorted(self.fetched):
            self.place(me, shard, self.fetched.pop(shard))


class Sum(Pushed, frozen=True):
    """Note sent with a sum of gradients: the number of gradients, and whether the push also fetches the parameters."""

    count: int
    fetch: bool


ShardRequest = tuple[Address, FlatArray | None, Sum | None]


@dataclass(frozen=True)
class Downpour(Strategy):
    """Downpour SGD (Dean et al. 2012, section 4.1 and algorithm 7.1): local steps, periodic pushes and fetches.

    A worker steps on its replica with the job's optimizer and accumulates its gradients. It pushes their sum every
    `n_push` steps and fetches the servers' parameters every `n_fetch` steps; the paper reports runs with n_push =
    n_fetch = 1. A server applies a sum of m gradients at once with `server_update`, as m steps along their mean, weight
    decay included, at the pushing worker's learning rate. Gradients left at the end are pushed without filters.

    A fetch travels while the worker computes the next gradients, as in the paper. The fetched parameters replace the
    replica before the next step after their arrival, even if some gradients are not pushed yet; the next fetch starts
    when the previous one has arrived. With overlap=False the worker waits for each fetch; with n_push = n_fetch = 1,
    the strategy then equals `asgd`, with half the staleness that overlap causes.

    Staleness counts the updates by other workers since the first of the accumulated gradients was computed. `replicas`
    is the number of backups of each server, one of which takes the place of a server that dies.
    """

    notes: ClassVar[Notes] = {
        "push": Sum,
        "reply to push": ParameterVersion,
        "reply to fetch": ParameterVersion,
        "parameters": ParameterVersion,
    }

    n_push: int = field(default=1, metadata=SHOWN)
    n_fetch: int = field(default=1, metadata=SHOWN)
    shards: int = 1
    server_update: ServerUpdate = field(default_factory=Plain)
    filters: tuple[Filter, ...] = ()
    codec: Codec = field(default_factory=Identity)
    overlap: bool = True
    replicas: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_replicas(self.replicas)
        check_filters(self.filters, self.codec)
        if self.server_update.compares_reads and (self.overlap or (self.n_push, self.n_fetch) != (1, 1)):
            raise CompositionError(
                f"{self.server_update} needs gradients at parameters that workers have read, but with "
                f"downpour({self.n_push}, {self.n_fetch}, overlap={self.overlap}) workers change their parameters "
                "before they compute gradients; use downpour(1, 1, overlap=False), or another server_update"
            )
        for name in ("n_push", "n_fetch", "shards"):
            require((got := getattr(self, name)) >= 1, f"{name} of downpour", ">= 1", got, "1 is usual")

    @property
    def traits(self) -> Traits:
        """The strategy's traits. Delivery has unbounded delay, because every gradient arrives and no worker waits for
        another worker.
        """
        results: tuple[ResultPolicy, ...] = ("server", "mean", "rank0", "best")
        memory = self.server_update.memory
        return Traits("unbounded delay", True, results, server_optimizer=True, memory=memory, own_rates=True)

    @property
    def taxonomy_entry(self) -> TaxonomyEntry:
        return TaxonomyEntry("central", "async", "ad hoc", "distributed PS" if self.shards > 1 else "single PS")

    @property
    def servers(self) -> int:
        return self.shards

    def worker_state(self, me: Worker) -> DownpourState:
        return DownpourState(
            [0] * self.shards, [0] * self.shards, [Outbox() for _ in range(self.shards)], 0 * me.params
        )

    def master_state(self, me: Server) -> DownpourServerState:
        return DownpourServerState(self.server_update.start(me), {rank: Inbox() for rank in range(me.cluster.workers)})

    async def worker(self, me: Worker) -> None:
        state: DownpourState = me.state
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
        """Receive the fetches in transit, then push the accumulated gradients, including entries that filters have
        withheld.
        """
        state: DownpourState = me.state
        await state.collect(me, wait=True)
        if state.count or any(outbox.pending is not None for outbox in state.outboxes):
            for to, data, note in self._pushes(me, state, flush=True):
                me.send(to, "push", data, note)
        me.leave()

    async def master(self, me: Server) -> None:
        """Apply every push at once, and answer every fetch with the parameters."""
        state: DownpourServerState = me.state
        async for message in me.messages():
            if message.tag == "push":
                self._push(me, state, message)
            if message.tag == "fetch" or (message.tag == "push" and message.note.fetch):
                self.server_update.read(me, state.update_state, message.source)
                if self.overlap:
                    me.send(message.source, "parameters", me.params, ParameterVersion(me.version))
                else:
                    me.reply(message, me.params, ParameterVersion(me.version))

    def _push(self, me: Server, state: DownpourServerState, message: Message) -> None:
        note, rank, dtype = message.note, message.source, name_of(me.params)
        total = unpack(self.filters, self.codec, message.payload, len(me.params), dtype, state.inboxes[rank])
        count = note.count
        steps = max(1, count)
        mean = total if steps == 1 else total / steps
        push = Push(rank, message.step - 1, note.version, note.lr, mean)
        late, [weight] = me.version - push.version, self.server_update.apply(me, state.update_state, [push], steps)
        if count:
            me.record_update(rank, late, count, weight / count)

    def _pushes(self, me: Worker, state: DownpourState, fetch: bool = False, flush: bool = False) -> list[ShardRequest]:
        """Return the push to each shard; `fetch` also requests the shard's parameters, `flush` bypasses the filters."""
        pushes: list[ShardRequest] = []
        for i, part in enumerate(slices(len(me.params), self.shards)):
            update, outbox = state.accrued[part], state.outboxes[i]
            data = pack(self.filters, self.codec, update, me.params[part], outbox, me.random, flush)
            pushes.append((server(i), data, Sum(state.since[i], me.lr, state.count, fetch)))
            state.pushed(i)
        state.accrued[:], state.count = 0, 0
        return pushes
