"""What nodes of Downpour remember, and what becomes of parameters that arrive while a worker computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flockstep.arrays.schema import FlatArray, slices
from flockstep.messages import Message, server
from flockstep.nodes import Worker
from flockstep.strategies.filters.packet import Inbox, Outbox


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
