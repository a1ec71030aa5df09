"""The nodes of a run, as a strategy's programs see them; the interface is the same in every driver.

A program is a coroutine. The program is suspended where time passes (a gradient is computed, a message is awaited) and
resumed by a driver, which alone knows whether time is real or virtual. Everything else takes no time.
"""

from __future__ import annotations

import math
import types
from bisect import bisect_left
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, get_args

import numpy as np

from flockstep.arrays.factors import FactoredWeight, Packing
from flockstep.arrays.schema import Schema, slices
from flockstep.errors import ConfigurationError, Diverged, PeerLost, require
from flockstep.messages import (
    ANYTHING,
    LEAVE,
    Address,
    AnyNote,
    Array,
    Mailbox,
    Message,
    Note,
    Notes,
    Wanted,
    frozen,
    node_name,
    note_kind,
    server,
)
from flockstep.optimizers.base import Optimizer, OptimizerState
from flockstep.options import BadGradientAction
from flockstep.programs import (
    GRADIENT,
    Again,
    Effect,
    NeedGradient,
    NeedWork,
    Port,
    Rendezvous,
    SharedArrays,
    Stepper,
    Task,
    suspend,
)


@dataclass(frozen=True)
class Cluster:
    """The numbers of workers and servers in a run."""

    workers: int
    servers: int = 0
    beside: tuple[int, ...] = ()
    """For each server, the rank of the worker on whose host the server runs; empty if servers are assigned to the hosts
    in turn.
    """
    replicas: int = 0
    """Number of backups of each server; each backup is a separate process."""

    @property
    def addresses(self) -> list[Address]:
        """Addresses of all nodes: workers by rank, then servers by index."""
        return [*range(self.workers), *map(server, range(self.servers))]

    @property
    def processes(self) -> list[Address]:
        """Addresses of the processes of all nodes: workers by rank, servers by index, then the backups of servers."""
        return [*range(self.workers), *map(server, range(self.servers * (1 + self.replicas)))]

    def logical(self, process: Address) -> Address:
        """Return the address of the node whose program a process runs; for a backup, the address of its server."""
        return process if process >= 0 or not self.replicas else server((-1 - process) % self.servers)

    def chain(self, address: Address) -> list[Address]:
        """Return the processes of a server: the server's own process, then its backups in the order in which they
        replace it.
        """
        return [server(-1 - address + self.servers * i) for i in range(1 + self.replicas)]

    def turn(self, process: Address) -> int:
        """Return the index by which a server or a backup is assigned to one of the hosts in turn, so that a backup is
        on another host than its server.
        """
        index = -1 - process
        return index if not self.replicas else index % self.servers + index // self.servers


@dataclass(frozen=True)
class View:
    """The workers that take part in a run: `ranks` in ascending order. Every change of the workers makes a new view
    with the next epoch number.
    """

    epoch: int
    ranks: tuple[int, ...]

    def without(self, rank: int) -> View:
        """Return the view without the worker that was lost; the same view if the worker does not take part."""
        return View(self.epoch + 1, tuple(r for r in self.ranks if r != rank)) if rank in self.ranks else self


@lru_cache(maxsize=8)
def everyone(workers: int) -> View:
    """Return the view at the start of a run, in which all workers take part. All nodes share one object, because n
    objects would take n² memory.
    """
    return View(0, tuple(range(workers)))


@dataclass(frozen=True)
class BadGradients:
    """Settings for gradients that are not finite, or whose norm is too large."""

    action: BadGradientAction = "stop"
    """Treatment of a refused gradient. `stop` ends the run. `skip` puts zeros in place of the gradient. `quarantine`
    also removes the worker from the run after `strikes` refused gradients.
    """
    max_norm: float | None = None
    """Largest Euclidean norm of a gradient; None for no limit."""
    strikes: int = 3
    """Number of refused gradients of a worker after which `quarantine` removes the worker."""

    def __post_init__(self) -> None:
        if self.action not in get_args(BadGradientAction):
            known = ", ".join(get_args(BadGradientAction))
            raise ConfigurationError(
                f"on_bad_gradient must be one of {known}, got {self.action!r}; stop is the default"
            )
        if self.max_norm is not None and not 0 < self.max_norm < math.inf:
            raise ConfigurationError(
                f"max_gradient_norm must be > 0 and finite, got {self.max_norm:g}; leave it out for no limit"
            )
        require(self.strikes >= 1, "strikes", ">= 1 refused gradients", self.strikes, "3 is the default")

    def replaced(self, action: BadGradientAction | None, max_norm: float | None) -> BadGradients:
        """Return these settings with another action or largest norm; None keeps a value."""
        return BadGradients(action or self.action, max_norm if max_norm is not None else self.max_norm, self.strikes)


BadGradientSettings = tuple[BadGradientAction | None, float | None]
"""Action and largest norm that replace the values in a `BadGradients`. None keeps the value of the `BadGradients`."""
Hosts = tuple[tuple[int, ...], ...]
"""Ranks of the workers of each host, in ascending order; the hosts are in the order of their first workers."""


@lru_cache(maxsize=8)
def one_host(workers: int) -> Hosts:
    """Return the hosts of a run whose workers are all on one host.

    All nodes share one object, because n objects would take n² memory.
    """
    return (tuple(range(workers)),)


class Node:
    """One node of a run, a worker or a server, as the strategy's program sees it."""

    __slots__ = (  # Python 3.11 looks attributes with defaults of the class, or behind 30 others, up in dicts
        "__dict__", "__weakref__", "_channel", "_latest", "address", "at_boundary", "bad_gradients", "before",
        "cluster", "departed", "freeze", "held", "hosts", "leaving", "lost", "mailbox", "notes", "params", "port",
        "port_copies", "random", "reported_departures", "schema", "sent", "started", "state", "step", "taken", "tasks",
        "view", "works_between_steps",
    )  # fmt: skip
    address: Address
    """Address to which other nodes send messages for this node: the rank of a worker, or -1 - i for server i."""
    cluster: Cluster
    """The numbers of workers and servers in the run: `cluster.workers` and `cluster.servers`."""
    params: Array
    """The node's live flat array of parameters: the whole model (K,), or a server's slice of it."""
    random: np.random.Generator
    """The node's own random generator, which depends on the run's seed and the node's address."""
    state: Any
    """State object that the strategy keeps between steps; at first, the object that `worker_state` or `master_state` of
    the strategy returned.
    """
    step: int
    """Number of steps that the node has taken since its program last began."""
    works_between_steps: bool
    """Whether the node has started a background task that may last longer than a step."""
    bad_gradients: BadGradients
    """Settings for gradients that are not finite or too large."""
    view: View
    """The workers that take part in the run now. If there is a supervisor, the supervisor reports changes."""
    hosts: Hosts
    """Ranks of the workers of each host at the start of the run. In virtual time, hosts are those that the network
    describes.
    """
    _handles: Callable[[Message], bool] | None = None
    """Method that handles some messages itself, and returns whether it did; None if programs receive all messages."""

    def __init__(self, address: Address, cluster: Cluster, params: Array, random: np.random.Generator):
        self.address = address
        self.cluster = cluster
        self.view, self.hosts = everyone(cluster.workers), one_host(cluster.workers)
        self.params = params
        self.random = random
        self.state = None
        self.step = 0
        self.works_between_steps, self.bad_gradients = False, BadGradients()
        self.before = 0
        """Steps of the run before its programs last restarted with a model that a script loaded."""
        self.notes: Notes = {}
        """The kinds of notes that the strategy declares; set by the driver."""
        self.mailbox = Mailbox()
        self.lost: set[Address] = set()
        self.departed: set[Address] = set()
        self.reported_departures: set[Address] = set()
        """Nodes whose leaving `messages` has reported to the program."""
        self.leaving: set[Address] = set()
        """Nodes that send nothing of their own any more, but answer requests; only for ranks of a communicator."""
        self.schema: Schema | None = None
        """Layout of the model's flat array; set by the driver. Without it the array counts as one tensor."""
        self.held = slice(0, len(params))
        """The slice of the model that `params` holds."""
        self.freeze: Callable[[Array], Array] = frozen
        """Creates the copies that messages carry; set by drivers with special memory."""
        self.port_copies = False
        """Whether the port copies an array that has to wait before it is sent, so that the array may change at once."""
        self.port: Port
        """The driver's side of the node; set by the driver."""
        self.sent: dict[Address, int] = {}
        """Node → number of messages sent to it."""
        self.tasks: list[Task] = []
        self._latest: dict[str, Task] = {}
        self.at_boundary: Callable[[], None] | None = None
        """Called where the node's program could restart from the node's current state."""
        self.taken: dict[str, list[Message]] = {}
        """Channel → messages taken by its task, for tasks that a restarting program restarts."""
        self._channel = ""
        self.started = 0
        """Number of background tasks that the node has started."""

    def boundary(self) -> None:
        """Mark a point at which the program could restart with the node's current state."""
        if self.at_boundary is not None and not self._channel and all(task.again != "never" for task in self.tasks):
            self.at_boundary()

    @property
    def run_step(self) -> int:
        """Number of steps that the node has taken since the start of the run, even if its program has restarted
        since.
        """
        return self.before + self.step

    def background(self, channel: str, program: Coroutine[Effect, Any, Any], again: Again = "never") -> Task:
        """Start a coroutine as a background task, which continues whenever its messages arrive. `finished` waits for
        its end.

        In a separate process messages are handled between gradients only; in virtual time, messages are handled when
        they arrive. A message for a task that waits for tag "x" in channel "c" must have the tag "x/c", unless a task
        of this channel sends the message.

        A saved state holds no tasks. If a task lasts longer than a step, the program must store the task's arguments,
        start the task again when a run continues, and find the task by its channel (`task`). `again` declares how the
        task is started again: the task receives its earlier messages again ("replayed"), or no messages, because the
        task has no state while it waits ("afresh").
        """
        self.started += 1
        task = self._latest[channel] = Task(self.started, f"/{channel}", program, again)
        self.works_between_steps = self.works_between_steps or again != "never"
        if self.at_boundary is not None and again == "replayed":
            self.taken[task.channel] = []
        self._advance(task, None)
        if not task.done:
            self.tasks.append(task)
        return task

    def task(self, channel: str) -> Task:
        """Return the background task that was started last in the given channel."""
        return self._latest[channel]

    async def finished(self, task: Task) -> Any:
        """Wait until a background task has ended; return the task's result."""
        ended = Wanted(task.channel[1:], self.address, -task.number)
        while task.work is not None:
            await suspend(NeedWork(task.work))
            poll(self)
        if not task.done:
            await suspend(ended)
        self.mailbox.take(ended)
        if self._latest.get(task.channel[1:]) is task:
            del self._latest[task.channel[1:]]
            self.taken.pop(task.channel, None)
        return task.result

    @property
    def busy(self) -> bool:
        """Whether a background task of the node is running."""
        return bool(self.tasks)

    @property
    def in_background(self) -> bool:
        """Whether a background task runs, and not the node's own program."""
        return bool(self._channel)

    def shapes(self, part: slice | None = None) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the tensors in the slice `part` of `params` (None: the whole array), in order. A tensor
        that the slice cuts counts as flat.
        """
        start, stop = (0, len(self.params)) if part is None else (part.start, part.stop)
        if self.schema is None:
            return ((stop - start,),)
        return self.schema.shapes_within(self.held.start + start, self.held.start + stop)

    def send(self, to: Address, tag: str, array: Array | None = None, note: AnyNote | None = None) -> None:
        """Send a message to another node. The array is copied, so it may change afterwards."""
        self._post(to, tag, array, note)

    def send_all(
        self, to: Iterable[Address], tag: str, array: Array | None = None, note: AnyNote | None = None
    ) -> None:
        """Send the same message to several nodes. The array is copied once."""
        receivers = list(to)
        if array is not None and len(receivers) > 1:
            array = self.freeze(array)
        for address in receivers:
            self._post(address, tag, array, note, copied=len(receivers) > 1)

    def reply(self, message: Message, array: Array | None = None, note: AnyNote | None = None) -> None:
        """Send an array, a note or both as the reply to a request."""
        self._post(message.source, message.tag, array, note, reply_to=message.number)

    def reply_all(self, requests: Sequence[Message], array: Array | None, note: AnyNote | None = None) -> None:
        """Reply to several requests with the same array, which is copied once."""
        if array is not None and len(requests) > 1:
            array = self.freeze(array)
        for message in requests:
            self._post(message.source, message.tag, array, note, message.number, copied=len(requests) > 1)

    def alarm(self, seconds: float, tag: str, note: AnyNote | None = None) -> None:
        """Let a message without an array arrive at this node itself after so many seconds of its clock."""
        number = self.sent[self.address] = self.sent.get(self.address, 0) + 1
        self.port.later(seconds, Message(self.address, tag, None, note or {}, self.step, number))

    @types.coroutine
    def receive(self, tag: str | None = None, source: Address | None = None) -> Generator[Effect, Any, Message]:
        """Wait for the next message with the given tag from the node `source` (None: from any node), and return the
        message.

        Raises:
            PeerLost: the node has left or was lost, so no such message can arrive any more.
        """
        return (yield from self._await(Wanted(None if tag is None else tag + self._channel, source)))

    async def ask(self, to: Address, tag: str, array: Array | None = None, note: AnyNote | None = None) -> Message:
        """Send a request to another node, wait for the reply, and return the reply."""
        return (await self.ask_all(tag, [(to, array, note)]))[0]

    async def ask_all(
        self, tag: str, requests: Sequence[tuple[Address, Array | None, AnyNote | None]]
    ) -> list[Message]:
        """Send several requests at once and wait for all replies, in the order of the requests."""
        numbers = [(to, self._post(to, tag, a, note)) for to, a, note in requests]
        return [await self._await(Wanted(source=to, reply_to=number)) for to, number in numbers]

    async def request(self, to: Address, tag: str, array: Array | None = None) -> Array:
        """Send a request to another node, wait for the reply, and return the array in the reply (read-only)."""
        return (await self.ask(to, tag, array)).payload

    def arrived(self, tag: str) -> Iterator[Message]:
        """Return the messages with the given tag that have arrived, without waiting."""
        self.port.collect()
        return self.mailbox.take_all(Wanted(tag + self._channel))

    async def messages(self) -> AsyncIterator[Message]:
        """Yield every message in the order of arrival, until all other workers have left.

        When a worker leaves, a message arrives with the tag `LEAVE`, whose note has `lost=1` if the worker died.
        """
        others = set(range(self.cluster.workers)) - {self.address} - self.reported_departures
        while others:
            if self.at_boundary is not None and self.address < 0:
                self.boundary()
            message = await self._await(ANYTHING)
            if message.tag == LEAVE:
                self.reported_departures.add(message.source)
                others.discard(message.source)
            yield message

    def now(self) -> float:
        """Seconds on this node's clock, virtual or real. Only differences between two readings have a meaning."""
        return self.port.read_clock()

    def record_update(
        self, source: Address | None, staleness: int | None = None, count: int = 1, weight: float | None = None
    ) -> None:
        """Record that `count` updates of `source` (None: of every worker) took effect on this node.

        `staleness` is the staleness of the updates in versions; `weight` is the factor on the learning rate with which
        each gradient was applied. A value of None is unknown, or is counted elsewhere.
        """
        self.port.updates(source, count, staleness, weight)

    def refuse(self, source: Address, reason: str) -> None:
        """Record that a gradient of worker `source` was refused and replaced by zeros.

        Raises: Diverged: the settings say that a bad gradient ends the run.
        """
        if self.bad_gradients.action == "stop":
            raise Diverged(reason)
        self.port.refused(source, reason)

    def record_scalar(self, name: str, value: float) -> None:
        """Write a scalar figure of the strategy to the record of the run."""
        self.port.scalar(name, value)

    def _advance_tasks(self) -> None:
        """Continue every task as far as possible with the messages that have arrived, and report the tasks that have
        ended.
        """
        for task in list(self.tasks):
            while (found := task.take(self.mailbox)) is not None:
                self._advance(task, found)
            while (wanted := task.wanted) is not None and self._can_never_arrive(wanted):
                self._advance(task, self._missed(wanted))
            while task.work is not None and task.work.done():
                self._advance(task, None)
            if task.done and task in self.tasks:
                self.tasks.remove(task)
                self._ended(task)

    def _ended(self, task: Task) -> None:
        """Notify the program, which may wait for the task's end."""
        self.mailbox.put(Message(self.address, "done", reply_to=-task.number))

    def _advance(self, task: Task, value: Message | PeerLost | None) -> None:
        outer, self._channel = self._channel, task.channel
        try:
            task.fail(value) if isinstance(value, PeerLost) else task.resume(value)
        finally:
            self._channel = outer

    def _post(
        self, to: Address, tag: str, array: Array | None, note: AnyNote | None, reply_to: int = 0, copied: bool = False
    ) -> int:
        if array is not None and not copied and (not self.port_copies or to == self.address):
            array = self.freeze(array)
        if self._channel and not reply_to and "/" not in tag:  # a tag that names its channel is used unchanged
            tag += self._channel
        kind = note_kind(self.notes, tag, reply_to) if self.notes else None
        if type(note) is not kind and (kind or isinstance(note, Note)):
            declared = kind.__name__ if kind else "no Note"
            raise TypeError(
                f"{tag!r} is declared with {declared} in the strategy's `notes`, but was sent with {note!r}; "
                'declare the kind of note there, as in notes = {"push": Pushed}'
            )
        number = self.sent[to] = self.sent.get(to, 0) + 1
        message = Message(self.address, tag, array, note or {}, self.step, number, reply_to)
        if to == self.address:
            deliver(self, message)  # the message stays in this process
        else:
            self.port.send(to, message)
        return number

    @types.coroutine
    def receive_array(self, tag: str, source: Address, into: Array | None = None) -> Generator[Effect, Any, Array]:
        """Return the array of the next message with the given tag from the given node. No message of the node may have
        been lost.

        With `into`, the array is written to `into` and `into` is returned.

        Raises:
            PeerLost: the node has left or was lost.
            ProtocolError: a message of the node was lost, or this message has no array.
        """
        wanted = Wanted(tag + self._channel, source, place=into)  # without `_await`, because all collectives use this
        mailbox = self.mailbox
        message = mailbox.take(wanted) if mailbox.queues.get(tag + self._channel) else None
        if message is None:
            if (self.departed or self.leaving) and self._can_never_arrive(wanted):
                raise self._missed(wanted)
            message = yield wanted
        if self.taken:
            self._keep(message)
        if mailbox.missing:
            self.require_all(source)
        array = message.payload if message.array is None else message.array
        if into is None or array is into:
            return array
        into[:] = array
        return into

    def require_all(self, source: Address) -> None:
        """Raise `ProtocolError` if a message of the given node was lost, because a sum needs all messages."""
        self.mailbox.require_all(source)

    @types.coroutine
    def _await(self, wanted: Wanted) -> Generator[Effect, Any, Message]:
        message: Message | None = self.mailbox.take(wanted)
        if message is None:
            if (self.departed or self.leaving) and self._can_never_arrive(wanted):
                raise self._missed(wanted)
            message = yield wanted
        if self.taken:
            self._keep(message)
        return message

    def _keep(self, message: Message) -> None:
        """Store a message that a task has taken, for a task that takes it again where a run continues."""
        if self._channel in self.taken:
            self.taken[self._channel].append(message)

    def _can_never_arrive(self, wanted: Wanted) -> bool:
        """Return whether a message that has not arrived can no longer arrive."""
        return wanted.source in self.departed

    def _missed(self, wanted: Wanted) -> PeerLost:
        """Return the error to raise in a wait for a message that can never arrive."""
        assert wanted.source is not None
        how = "was lost" if wanted.source in self.lost else "has left"
        here = f"{node_name(self.address)} waited for {wanted} at step {self.run_step}"
        return PeerLost(f"{node_name(wanted.source)} {how} while {here}")


def deliver(node: Node, message: Message) -> None:
    """Hand `node` a message that has arrived. Drivers call this function."""
    if node._handles is not None and node._handles(message):
        return
    if message.tag == LEAVE:
        node.departed.add(message.source)
    node.mailbox.put(message)
    if node.tasks:
        node._advance_tasks()


def poll(node: Node) -> bool:
    """Continue the background tasks of `node` that can continue, and return whether a task still waits for work that
    ends without a message. Drivers call this function.
    """
    node._advance_tasks()
    return any(task.work is not None for task in node.tasks)


def lose(node: Node, address: Address) -> None:
    """Tell `node` that the node at `address` has died; the program of `node` sees that the node leaves. Drivers call
    this function.
    """
    node.lost.add(address)
    node.view = node.view.without(address)
    if address not in node.departed:
        deliver(node, Message(address, LEAVE, note={"lost": 1}))


def missed(node: Node, wanted: Wanted) -> PeerLost:
    """Return the error to raise in the program of `node` if it waits for a message that can never arrive. Drivers call
    this function.
    """
    return node._missed(wanted)


class Peer(Node):
    """One of `workers` nodes that send each other messages and take part in collectives."""

    __slots__ = "rank", "rendezvous", "shared", "workers"

    def __init__(self, rank: int, cluster: Cluster, params: Array, random: np.random.Generator):
        super().__init__(rank, cluster, params, random)
        self.rank = rank
        """Rank of this worker, from 0."""
        self.workers = cluster.workers
        """Number of workers in the run (n in the literature)."""
        self.rendezvous: Rendezvous | None = None
        """Where workers in separate processes open connections other than messages; set by the driver."""
        self.shared = SharedArrays()
        """Arrays in memory that workers of this host share; set by the driver."""


class Worker(Peer):
    """A node that computes gradients, as the strategy's program sees it. `step` is the number of gradients that the
    node has used.
    """

    __slots__ = (
        "_peers", "batch", "find_layers", "fragments", "knows_finite", "loss", "on_hold", "optimizer", "overlaps",
        "revised", "samples", "stepper", "steps", "train_size",
    )  # fmt: skip

    def __init__(
        self,
        rank: int,
        cluster: Cluster,
        params: Array,
        random: np.random.Generator,
        stepper: Stepper,
        steps: int | None,
        optimizer: Optimizer | None = None,
        train_size: int = 0,
    ):
        super().__init__(rank, cluster, params, random)
        self.steps = steps
        self.loss = 0.0
        """Mean loss of the last gradient's samples, in a declared job; a script may not give it for every step."""
        self.optimizer = optimizer
        """The job's optimizer, in the form of servers' optimizers, which can step a slice of the parameters."""
        self.train_size = train_size
        """Number of training samples of a declared job; 0 in a script's own loop."""
        self.samples = 0
        """Number of training samples in this worker's part; set by the driver of a declared job."""
        self.batch = 0
        """Number of samples of a gradient at the start of the run; set by the driver of a declared job."""
        self.find_layers: Callable[[], tuple[FactoredWeight, ...]] = tuple
        """Function that returns the layers whose gradients can be factored; set by the driver of a declared job."""
        self.fragments: Callable[[int], list[slice]] = partial(slices, len(params))
        """Function that returns the slices of `params` that belong to equal parts of the whole model, given the number
        of parts; set by the driver of a process that holds a part of the model.
        """
        self.stepper = stepper
        self.on_hold: Callable[[bool], object] = bool
        """Called by `hold`; set by the driver."""
        self.knows_finite: Callable[[], bool] = bool
        """Function that returns whether the whole gradient is known to be finite, so that it need not be looked at;
        set by the driver.
        """
        self.overlaps = False
        """Whether parts of a gradient are passed on while the rest is computed, and may travel meanwhile; set by the
        driver.
        """
        self.revised = False
        """Whether a script has changed its gradient after a part of it was passed on; set by the driver, reset by the
        program.
        """
        self._peers: tuple[View, list[int]] | None = None

    @property
    def tensors(self) -> tuple[slice, ...]:
        """Slices of the model's tensors in the flat array, in order."""
        return (slice(0, len(self.params)),) if self.schema is None else self.schema.slices

    @property
    def peers(self) -> list[int]:
        """Ranks of the other workers that are not lost, in ascending order."""
        if self._peers is None or self._peers[0] is not self.view:
            self._peers = self.view, (peers := list(self.view.ranks))
            at = bisect_left(peers, self.address)
            if peers[at : at + 1] == [self.address]:
                del peers[at]
        return self._peers[1]

    @property
    def server_addresses(self) -> list[Address]:
        """Addresses of the servers, by index, for `send` and `request`; server i of k holds the i-th of k slices."""
        return [*map(server, range(self.cluster.servers))]

    def hold(self, ended: bool = False) -> None:
        """Mark where an exchange between replicas begins, or has `ended`: there the program goes on from its state if
        other workers are lost before the next step.
        """
        self.on_hold(ended)

    @property
    def training(self) -> bool:
        """Whether there is another gradient to compute.

        Use `training` as the condition of the worker's loop. A worker can restart at the top of this loop.
        """
        if self.at_boundary is not None:
            self.boundary()
        return self.steps is None or self.step < self.steps

    @property
    def has_steps(self) -> bool:
        """Whether there is another gradient to compute. Use `has_steps` anywhere except in the condition of the
        worker's loop, for which there is `training`.
        """
        return self.steps is None or self.step < self.steps

    @property
    def lr(self) -> float:
        """Learning rate of the worker's next step.

        Raises:
            ConfigurationError: the learning rate belongs to another library's optimizer and cannot be read.
        """
        rate = self.stepper.lr
        if math.isnan(rate):
            raise ConfigurationError(
                "the strategy needs the learning rate, which cannot be read from this optimizer; give the groups of a "
                "torch optimizer a value lr, and use optax as in "
                'optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), or the expression "sgd(lr=0.1)"'
            )
        return rate

    @types.coroutine
    def gradient(self) -> Generator[Effect, Any, Array]:
        """Compute the mean gradient (K,) of the next mini-batch at the current `params`. The array is valid until the
        next call.
        """
        gradient: Array = yield GRADIENT
        self.step += 1
        return gradient

    def gradient_unless(self, tag: str) -> Awaitable[Array | Message]:
        """Compute the gradient of the next mini-batch, unless a message with the given tag arrives first; in that case,
        return the message.

        Both cases count as a step. After such a message, the computation ends at once in virtual time; in a real
        process, the gradient is completed and dropped.
        """
        return self._gradient(NeedGradient(unless=tag + self._channel))

    async def gradient_parts(
        self, parts: Sequence[slice], tentative: bool = False
    ) -> AsyncIterator[tuple[slice, Array]]:
        """Compute the gradient of one mini-batch and yield it in parts, in the order of the backward pass: from the end
        of the flat array.

        `parts` cover the array from its end to its start, each as `slice(start, stop)`. For each part, the generator
        yields the part and the whole array, in which this part and all earlier parts are complete. With `tentative`, a
        script may still change parts that were yielded; when the last part is yielded, `revised` says whether the
        script has changed them.
        """
        for part in parts:
            share = 1 - part.start / max(len(self.params), 1)
            yield part, await self._gradient(NeedGradient(share=share, tentative=tentative, closes=part.start == 0))

    def gradient_of(
        self, block: int, turn: int | None = None, last: bool = True, unless: str | None = None
    ) -> Awaitable[Array | Message]:
        """Compute the gradient of a mini-batch from the part of the data that belongs to worker `block`. `last` says
        whether this gradient ends the step.

        `turn` is the index of a batch in this part of the data, from 0, and selects the same batch on every worker;
        None selects the next batch. A message with the tag `unless` cancels the gradient, as in `gradient_unless`. This
        method requires a declared job.
        """
        tag = None if unless is None else unless + self._channel
        return self._gradient(NeedGradient(unless=tag, block=block, turn=turn, closes=last))

    def gradient_over(self, start: int, stop: int, last: bool = True) -> Awaitable[Array]:
        """Compute the mean gradient (K,) over the training samples `start` to `stop` - 1; afterwards, `loss` is the
        mean loss of these samples.

        This method requires a declared job.
        """
        return self._gradient(NeedGradient(samples=(start, stop), closes=last))

    def gradient_toward(self, teachers: Sequence[Array], weight: float) -> Awaitable[Array]:
        """Compute the mean gradient (K,) of the loss plus `weight` times the distance to the mean prediction of
        `teachers`.

        This method requires a declared job.
        """
        return self._gradient(NeedGradient(teachers=tuple(teachers), weight=weight))

    @property
    def layers(self) -> tuple[FactoredWeight, ...]:
        """The layers whose gradients can be computed as factors, that is, the fully connected layers; empty in a
        script's own loop.
        """
        return self.find_layers()

    async def gradient_in_factors(self, layers: Sequence[FactoredWeight]) -> Array:
        """Compute the gradient of the next mini-batch with `layers` as factors, in the layout of `Packing(K,
        layers)`.
        """
        packed: Array = await self._gradient(NeedGradient(layers=tuple(layers)))
        return packed[: Packing(len(self.params), layers).size]

    @types.coroutine
    def _gradient(self, need: NeedGradient) -> Generator[Effect, Any, Any]:
        gradient = yield need
        self.step += need.closes or isinstance(gradient, Message)
        return gradient

    def optimizer_step(self, gradient: Array, in_place: bool = False) -> None:
        """Update `params` in place with this worker's own optimizer, along the gradient (K,).

        `in_place`: the optimizer may use and change the array itself, instead of a copy; the caller does not change an
        element before the same element of the next gradient is complete.
        """
        self.stepper.step(self.params, gradient, in_place)

    def record_round(self, count: int = 1) -> None:
        """Record that `count` updates of every other worker took effect on this worker, none of them stale."""
        self.port.updates(None, count, 0)

    def leave(self, peers: bool = False) -> None:
        """Announce, to the servers and with `peers` also to the other workers, that this worker sends no more
        messages.
        """
        self.send_all(self.server_addresses, LEAVE)
        if peers:
            self.send_all(self.peers, LEAVE)


class Server(Node):
    """A node that holds the shared parameters, or slice number `index` of them, as the strategy's program sees it."""

    __slots__ = "optimizer", "optimizer_state", "version"

    def __init__(self, index: int, cluster: Cluster, params: Array, random: np.random.Generator, optimizer: Optimizer):
        super().__init__(server(index), cluster, params, random)
        self.optimizer = optimizer
        self.optimizer_state: OptimizerState = optimizer.init(params)
        self.version = 0

    def update(self, gradient: Array, lr: float | None = None, share: float = 1.0) -> None:
        """Apply one optimizer step, or a share of one, to the shared parameters, and increase the version by one."""
        rate = self.optimizer.lr if lr is None else lr
        self.optimizer.step(self.params, gradient, self.optimizer_state, rate, share)
        self.version += 1
