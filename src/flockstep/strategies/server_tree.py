"""What the leaves and the root of a two-level parameter server do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flockstep.arrays.schema import FlatArray
from flockstep.errors import ProtocolError
from flockstep.messages import BYE, MASTER, Address, Message, Note, Notes, node_name, server
from flockstep.nodes import Server
from flockstep.strategies.access import Held, Pushed


class Summed(Note, frozen=True):
    """Beside a sum of gradients: whose they are, the versions they were computed on, and the steps of the group."""

    ranks: list[int]
    versions: list[int]
    lr: float
    steps: int


class News(Note, frozen=True):
    """Beside the root's parameters: their version, and how many gradients of each rank are new in them."""

    version: int
    news: list[int]


NOTES: Notes = {
    "push": Pushed,
    "reply to push": Held,
    "sum": Summed,
    "params": News,
    "last": Held,
    "reply to last": News,
}


@dataclass
class LeafState:
    """What a leaf remembers: what it has collected and not passed on, who waits, and how far its workers are."""

    version: int = 0
    """The root's version of the parameters that it holds."""
    pushes: list[Message] = field(default_factory=list)
    waiting: list[Message] = field(default_factory=list)
    clocks: dict[int, int] = field(default_factory=dict)
    under_way: int = 0
    """Sums that it has passed on and not been answered yet."""


@dataclass
class RootState:
    """What the root remembers: the sums that it has not used, whose gradients it has, and what each leaf knows of."""

    applied: list[int]
    """Gradients applied, by rank."""
    told: dict[Address, list[int]]
    """For each leaf, the same when it was last answered."""
    sums: list[Message] = field(default_factory=list)


async def serve_leaf(me: Server, workers: slice, sync: bool) -> None:
    """Collect, pass on, hand down, until every worker of the group has left; end with the root's final parameters."""
    state: LeafState = me.state
    members = set(range(workers.start, workers.stop))
    while members or state.under_way:
        message = await me.receive()
        match message.tag:
            case "push":
                state.pushes.append(message)
                state.clocks[message.source] = message.step
                if not sync:
                    me.reply(message, me.params, Held(state.version))
            case "params":
                _refresh(me, state, message)
                state.under_way -= 1
                me.reply_all(state.waiting, me.params, Held(state.version))
                state.waiting = []
            case _:
                members.discard(message.source)
        full = len(members) if sync or not members else workers.stop - workers.start
        if state.pushes and len(state.pushes) >= full:
            _pass_on(me, state, sync)
    _refresh(me, state, await me.ask(MASTER, "last", note=Held(state.version)))
    me.send(MASTER, BYE)


def _refresh(me: Server, state: LeafState, message: Message) -> None:
    """Take over the root's parameters, and note whose gradients they contain that were not in the last ones."""
    if message.array is not None:
        me.params[:] = message.array
    state.version, news = message.note.version, message.note.news
    if min(news) == max(news) > 0:
        me.record_update(None, count=news[0])
        return
    for rank, count in enumerate(news):
        if count:
            me.record_update(rank, count=count)


def _pass_on(me: Server, state: LeafState, sync: bool) -> None:
    """Send the root the sum of what has been collected, and whose it is."""
    pushes, state.pushes = state.pushes, []
    if sync:
        pushes.sort(key=lambda push: push.source)
        state.waiting = pushes
    ranks, versions = [push.source for push in pushes], [push.note.version for push in pushes]
    note = Summed(ranks, versions, pushes[0].note.lr, sum(state.clocks.values()))
    me.send(MASTER, "sum", sum_of(pushes), note)
    state.under_way += 1


async def serve_root(me: Server, sync: bool, full: int) -> None:
    """Step, and hand down, until every leaf has left; `full` gradients make a full step of the optimizer."""
    state: RootState = me.state
    leaves = {server(index) for index in range(1, me.cluster.servers)}
    ended: list[Message] = []
    while len(ended) < len(leaves):
        message = await me.receive()
        match message.tag:
            case "sum":
                _require_ranks(me, message)
                state.sums.append(message)
            case "last":
                ended.append(message)
        if state.sums and (not sync or len(state.sums) == len(leaves) - len(ended)):
            _step(me, state, full)
    for request in ended:
        fresh = request.note.version == me.version
        me.reply(request, None if fresh else me.params, _news(me, state, request.source))
    for leaf in leaves:
        await me.receive(BYE, leaf)


def _step(me: Server, state: RootState, full: int) -> None:
    """One step along the mean of the sums that are here, or the share of a step that so few gradients stand for."""
    sums = sorted(state.sums, key=lambda message: -message.source)
    state.sums = []
    ranks = [rank for message in sums for rank in message.note.ranks]
    versions = [version for message in sums for version in message.note.versions]
    mean = sum_of(sums)
    mean /= len(ranks)
    share, before = len(ranks) / full, me.version
    me.update(mean, sums[0].note.lr, share)
    for rank, version in zip(ranks, versions, strict=True):
        me.record_update(rank, before - version, weight=share / len(ranks))
        state.applied[rank] += 1
    for message in sums:
        me.send(message.source, "params", me.params, _news(me, state, message.source))


def _news(me: Server, state: RootState, leaf: Address) -> News:
    """What an answer to that leaf says of its parameters."""
    told = state.told.get(leaf, [0] * len(state.applied))
    state.told[leaf] = list(state.applied)
    return News(me.version, [now - then for now, then in zip(state.applied, told, strict=True)])


def _require_ranks(me: Server, message: Message) -> None:
    """Raise `ProtocolError` unless a sum is of gradients of workers, each with its version."""
    ranks, versions = message.note.ranks, message.note.versions
    if not ranks or len(ranks) != len(versions) or not all(0 <= rank < me.cluster.workers for rank in ranks):
        raise ProtocolError(
            f"{node_name(message.source)} sent a sum of gradients of ranks {ranks} with versions {versions}; "
            f"each needs one of the ranks 0 to {me.cluster.workers - 1}, and a version"
        )


def sum_of(messages: Sequence[Message]) -> FlatArray:
    """The sum of the messages' arrays, in this order."""
    total: FlatArray = messages[0].payload.copy()
    for message in messages[1:]:
        total += message.payload
    return total
