"""A two-level parameter server: each leaf server collects gradients from a group of workers, and the root server
collects the leaves' sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from flockstep.arrays.namespace import copied
from flockstep.arrays.schema import FlatArray, slices
from flockstep.errors import CompositionError, ProtocolError, require
from flockstep.expression import SHOWN
from flockstep.messages import LEAVE, MASTER, Address, Message, Note, Notes, node_name, server
from flockstep.nodes import Server, Worker
from flockstep.strategies.access import ParameterVersion, Pushed
from flockstep.strategies.base import Clips, ResultPolicy, Strategy, TaxonomyEntry, Traits, check_replicas
from flockstep.strategies.server_updates.base import rate_of
from flockstep.strategies.traits import Delivery


class Summed(Note, frozen=True):
    """Note sent with a sum of gradients: the ranks and versions of the gradients, the learning rate, and the number of
    steps that the group has taken.
    """

    ranks: list[int]
    versions: list[int]
    lr: float
    steps: int


class RootParameters(Note, frozen=True):
    """Note sent with the root's parameters: their version, and for each rank the number of the worker's gradients that
    the parameters newly include.
    """

    version: int
    new_counts: list[int]


NOTES: Notes = {
    "push": Pushed,
    "reply to push": ParameterVersion,
    "sum": Summed,
    "params": RootParameters,
    "last": ParameterVersion,
    "reply to last": RootParameters,
}


@dataclass
class LeafState:
    """A leaf server's state: the gradients that it has not sent to the root yet, the workers that wait for parameters,
    and the steps of its workers.
    """

    version: int = 0
    """Version of the root's parameters that the leaf holds."""
    pushes: list[Message] = field(default_factory=list)
    waiting: list[Message] = field(default_factory=list)
    clocks: dict[int, int] = field(default_factory=dict)
    under_way: int = 0
    """Number of sums that the leaf has sent and the root has not yet answered."""


@dataclass
class RootState:
    """The root server's state: the sums that it has not applied, the number of gradients that it has applied, and the
    number that each leaf knows of.
    """

    applied: list[int]
    """Rank → number of the worker's gradients that the root has applied."""
    reported: dict[Address, list[int]]
    """For each leaf, the value of `applied` at the root's last answer to the leaf."""
    sums: list[Message] = field(default_factory=list)


async def serve_leaf(me: Server, workers: slice, sync: bool) -> None:
    """Run a leaf until all workers of its group have left; the leaf's final parameters are the root's parameters.

    Args:
        workers: the ranks of the leaf's group of workers.
        sync: whether each sum takes one gradient of every worker of the group.
    """
    state: LeafState = me.state
    members = set(range(workers.start, workers.stop))
    while members or state.under_way:
        message = await me.receive()
        match message.tag:
            case "push":
                state.pushes.append(message)
                state.clocks[message.source] = message.step
                if not sync:
                    me.reply(message, me.params, ParameterVersion(state.version))
            case "params":
                _refresh(me, state, message)
                state.under_way -= 1
                me.reply_all(state.waiting, me.params, ParameterVersion(state.version))
                state.waiting = []
            case _:
                members.discard(message.source)
        full = len(members) if sync or not members else workers.stop - workers.start
        if state.pushes and len(state.pushes) >= full:
            _pass_on(me, state, sync)
    _refresh(me, state, await me.ask(MASTER, "last", note=ParameterVersion(state.version)))
    me.send(MASTER, LEAVE)


def _refresh(me: Server, state: LeafState, message: Message) -> None:
    """Replace the leaf's parameters with the root's, and record the gradients that they newly include."""
    if message.array is not None:
        me.params[:] = message.array
    state.version, counts = message.note.version, message.note.new_counts
    if min(counts) == max(counts) > 0:
        me.record_update(None, count=counts[0])
        return
    for rank, count in enumerate(counts):
        if count:
            me.record_update(rank, count=count)


def _pass_on(me: Server, state: LeafState, sync: bool) -> None:
    """Send the root the sum of the collected gradients, with their ranks and versions."""
    pushes, state.pushes = state.pushes, []
    if sync:
        pushes.sort(key=lambda push: push.source)
        state.waiting = pushes
    ranks, versions = [push.source for push in pushes], [push.note.version for push in pushes]
    note = Summed(ranks, versions, rate_of(push.note for push in pushes), sum(state.clocks.values()))
    me.send(MASTER, "sum", sum_of(pushes), note)
    state.under_way += 1


async def serve_root(me: Server, sync: bool, full: int) -> None:
    """Run the root until all leaves have left.

    Args:
        sync: whether each step takes one sum of every leaf.
        full: number of gradients that make a full step of the optimizer.
    """
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
        me.reply(request, None if fresh else me.params, _root_parameters(me, state, request.source))
    for leaf in leaves:
        await me.receive(LEAVE, leaf)


def _step(me: Server, state: RootState, full: int) -> None:
    """Step along the mean of the waiting sums; m gradients make m / `full` of a step."""
    sums = sorted(state.sums, key=lambda message: -message.source)
    state.sums = []
    ranks = [rank for message in sums for rank in message.note.ranks]
    versions = [version for message in sums for version in message.note.versions]
    mean = sum_of(sums)
    mean /= len(ranks)
    share, before = len(ranks) / full, me.version
    me.update(mean, rate_of(message.note for message in sums for _ in message.note.ranks), share)
    for rank, version in zip(ranks, versions, strict=True):
        me.record_update(rank, before - version, weight=share / len(ranks))
        state.applied[rank] += 1
    for message in sums:
        me.send(message.source, "params", me.params, _root_parameters(me, state, message.source))


def _root_parameters(me: Server, state: RootState, leaf: Address) -> RootParameters:
    """Return the note of an answer to a leaf: the version, and the number of new gradients of each rank."""
    reported = state.reported.get(leaf, [0] * len(state.applied))
    state.reported[leaf] = list(state.applied)
    return RootParameters(me.version, [now - then for now, then in zip(state.applied, reported, strict=True)])


def _require_ranks(me: Server, message: Message) -> None:
    """Check that a sum consists of at least one worker's gradients, each with its version.

    Raises:
        ProtocolError: the ranks or versions are missing, unequal in number or out of range.
    """
    ranks, versions = message.note.ranks, message.note.versions
    if not ranks or len(ranks) != len(versions) or not all(0 <= rank < me.cluster.workers for rank in ranks):
        raise ProtocolError(
            f"{node_name(message.source)} sent a sum of gradients of ranks {ranks} with versions {versions}; each "
            f"gradient needs a version and one of the ranks 0 to {me.cluster.workers - 1}"
        )


def sum_of(messages: Sequence[Message]) -> FlatArray:
    """Return the sum of the messages' arrays, added in the given order."""
    total: FlatArray = copied(messages[0].payload)
    for message in messages[1:]:
        total += message.payload
    return total


Level = Literal["synchronous", "asynchronous"]


@dataclass
class ReadState:
    """A worker's state: the version of the root's parameters that the worker has read."""

    version: int = 0


@dataclass(frozen=True)
class Hierarchical(Strategy):
    """Two-level parameter server (MXNet: Chen et al. 2015, section 3.2; Rudra-adv: Gupta et al. 2016, section 3.3).

    Server 0 is the root; every other server is the leaf of at most `group` workers, in order of rank. A leaf sums as
    many gradients as it has workers and sends the sum to the root. The root steps the job's optimizer along the mean
    and answers with the parameters. So the root sends and receives 1/`group` of the bytes of a single server. A leaf
    runs on the host of its group's first worker, the root on the host of worker 0: with `group` workers on every host,
    only sums and the root's answers pass between hosts.

    A synchronous leaf takes one gradient of each worker, in order of rank, and its workers wait for the root's answer.
    An asynchronous leaf takes gradients in order of arrival and answers a worker at once with the leaf's current
    parameters, which the root's answer to each sum replaces. A synchronous root takes one step for the sums of all
    leaves, in order of index: synchronous SGD, up to the order of addition. An asynchronous root takes a step for each
    sum, in which every gradient counts as 1/m of a step, m being the number of workers of the largest leaf, so that the
    step of a smaller leaf is shorter. The staleness of a gradient is the number of the root's updates since the
    parameters with which the gradient was computed. `replicas` is the number of backups of each leaf and of the root.
    """

    notes: ClassVar[Notes] = NOTES

    group: int = field(default=4, metadata=SHOWN)
    leaf: Level = "synchronous"
    root: Level = "synchronous"
    replicas: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_replicas(self.replicas)
        require(self.group >= 1, "group", ">= 1 workers", self.group, "4 is usual")
        if self.leaf == "asynchronous" and self.root == "synchronous":
            raise CompositionError(
                "a synchronous root waits for one sum from every leaf, but with leaf=asynchronous leaves send sums "
                "at different rates; use root=asynchronous as well"
            )

    @property
    def traits(self) -> Traits:
        """The strategy's traits. Delivery is synchronous if the root is synchronous, otherwise its delay is unbounded.
        A run survives the death of workers if the leaves are asynchronous.
        """
        delivery: Delivery = "synchronous" if self.root == "synchronous" else "unbounded delay"
        survives = self.leaf == "asynchronous"
        clips: Clips = "combined" if self.root == "synchronous" else "own"
        results: tuple[ResultPolicy, ...] = ("server", "mean", "rank0", "best")
        return Traits(delivery, survives, results, server_optimizer=True, clips=clips, checkpoints=False)

    @property
    def taxonomy_entry(self) -> TaxonomyEntry:
        sync = self.root == "synchronous"
        return TaxonomyEntry("central", "sync" if sync else "async", "reduce" if sync else "ad hoc", "hierarchical PS")

    def servers_for(self, workers: int) -> int:
        """Return the number of servers: one root, and one leaf for each group of `group` workers."""
        return 1 + len(self._groups(workers))

    def beside(self, workers: int) -> tuple[int, ...]:
        """Return, for each server, the rank of the worker on whose host the server runs: worker 0 for the root, the
        first worker of the group for a leaf.
        """
        return (0, *(group.start for group in self._groups(workers)))

    def held(self, workers: int, size: int) -> list[slice]:
        """Return a slice of the whole model for every server, because every server holds the whole model. The resulting
        model is the root's.
        """
        return [slice(0, size)] * self.servers_for(workers)

    def worker_state(self, me: Worker) -> ReadState:
        return ReadState()

    def master_state(self, me: Server) -> LeafState | RootState:
        return RootState([0] * me.cluster.workers, {}) if me.address == MASTER else LeafState()

    async def worker(self, me: Worker) -> None:
        state: ReadState = me.state
        while me.training:
            gradient = await me.gradient()
            reply = await me.ask(self._leaf_of(me), "push", gradient, Pushed(state.version, me.lr))
            me.params[:] = reply.payload
            state.version = reply.note.version

    async def finish(self, me: Worker) -> None:
        """Leave the run: the worker notifies its leaf, and the leaf notifies the root once all workers of the leaf have
        left.
        """
        me.send(self._leaf_of(me), LEAVE)

    async def master(self, me: Server) -> None:
        """Run the root on server 0 and a leaf on every other server."""
        groups, sync = self._groups(me.cluster.workers), self.root == "synchronous"
        if me.address == MASTER:
            largest = max(group.stop - group.start for group in groups)
            await serve_root(me, sync, me.cluster.workers if sync else largest)
        else:
            await serve_leaf(me, groups[server(1) - me.address], self.leaf == "synchronous")

    def _groups(self, workers: int) -> list[slice]:
        """Return the ranks of each leaf's workers, as slices."""
        return slices(workers, -(-workers // self.group))

    def _leaf_of(self, me: Worker) -> Address:
        return next(server(1 + i) for i, part in enumerate(self._groups(me.workers)) if me.rank < part.stop)
