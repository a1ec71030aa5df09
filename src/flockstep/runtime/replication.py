"""Servers with backups: a message to a server takes effect once, even if the server dies.

The programs of a server and of its backups are one deterministic state machine (Schneider 1990): each process runs the
server's program, and all of them handle the same messages in the same order. The first process of the chain, the head,
puts the messages into a log and passes the log on (chain replication, van Renesse & Schneider 2004; with one backup
this is primary-backup). The head sends the program's answers to a message, and the acknowledgment of the message, only
after the whole chain has the message. A sender keeps each message until it is acknowledged.

If the head dies, the next process of the chain becomes the head, with the next epoch: the new head sends again every
message that receivers may lack, and workers send again every message that was not acknowledged. Messages between two
programs are numbered and arrive in order, so a receiver recognizes a repeated message by the number of the last one
that it has handled. Messages of an older epoch are refused.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from flockstep.arrays.namespace import copied
from flockstep.arrays.schema import FlatArray
from flockstep.errors import PeerLost, ProtocolError
from flockstep.links.wire import note_reader
from flockstep.messages import LEAVE, Address, Array, Message, Note, Notes, node_name, note_kind
from flockstep.nodes import Cluster, Node, Server
from flockstep.records.events import Event, PromotedEvent, RefusedEvent, ScalarEvent, UpdateEvent
from flockstep.records.failpoints import reach
from flockstep.runtime.node_metrics import NodeMetrics

DATA, LOG, STORED, FENCED = "replicas.data", "replicas.log", "replicas.stored", "replicas.fenced"
"""Tags of the messages between the processes of a run with backups: a program's message, an entry of the log, the
acknowledgment of entries, and the answer to a process that is no longer the head.
"""


class Inner(Note, frozen=True):
    """A message between two programs without its array; `note` is in MessagePack."""

    source: int
    tag: str
    number: int
    reply_to: int
    step: int
    note: bytes


class Envelope(Note, frozen=True):
    """Message between a server's head and another node.

    `acknowledged` is the number of the receiver's last message that can no longer be lost. `inner` is None in a message
    that only acknowledges.
    """

    epoch: int
    acknowledged: int
    inner: Inner | None


class Logged(Note, frozen=True):
    """Entry `position` of a server's log: a message, or (`lost`) the death of the worker `inner.source`.

    `acknowledged` is the number of the server's last message that the source of the message has received.
    """

    position: int
    acknowledged: int
    inner: Inner
    lost: bool


class Stored(Note, frozen=True):
    """Acknowledgment of a backup that it and all later backups have stored the log up to entry `position`."""

    position: int


class Fenced(Note, frozen=True):
    """Answer to a process that still acts as the head of a server but no longer is: the epoch of the current head."""

    epoch: int


NOTES: Notes = {DATA: Envelope, LOG: Logged, STORED: Stored, FENCED: Fenced}


class ProgramRunner(Protocol):
    """The methods of a node's runner that replication needs."""

    node: Node
    metrics: NodeMetrics
    done: bool
    clock: Callable[[], float]
    send: Callable[..., None]
    send_snapshot: Callable[..., None] | None

    def deliver(self, message: Message, sent_at: float | None = None) -> None:
        """Handle an arrived message that is addressed to the program."""

    def take_loss(self, address: Address) -> None:
        """Handle the death of a node, and tell the program of the death."""

    def emit(self, event: Event) -> None:
        """Write an event to the record."""


class Endpoint:
    """A node's exchange of messages with replicated servers, any of which a backup may take over; workers use this
    class.
    """

    def __init__(
        self, runner: ProgramRunner, cluster: Cluster, address: Address, transmit: Callable[[Address, Message], None]
    ):
        """`address`: address of this process; `transmit` sends a message to another process."""
        self.chains = {server: cluster.chain(server) for server in cluster.addresses if server < 0}
        """Server → its processes that are alive, the head first."""
        self.epochs = dict.fromkeys(self.chains, 0)
        """Server → number of times that a backup has taken the place of the head."""
        self.sent: dict[Address, deque[Message]] = {}
        """Node → messages to its program that are not acknowledged, in order."""
        self.refused = 0
        """Number of messages of an older epoch that were refused."""
        self.repeated = 0
        """Number of repeated messages that were dropped."""
        self._runner, self._cluster, self._address, self._transmit = runner, cluster, address, transmit
        self._numbers: Counter[Address] = Counter()
        runner.send = self.send

    def send(self, to: Address, message: Message) -> None:
        """Send a message of the program; keep a message to a server until the server acknowledges it."""
        if to >= 0:
            self._transmit(to, message)
            return
        if message.array is not None:
            message.array = self._runner.node.freeze(message.array)
        self.sent.setdefault(to, deque()).append(message)
        self._post_data(to, message)

    def take(self, message: Message, sent_at: float | None) -> None:
        """Handle a message from another process."""
        inner = self._accepted(message)
        if inner is not None:
            self._runner.deliver(self._unpacked(inner, message.array), sent_at)

    def loses(self, address: Address) -> bool:
        """Handle the death of a process; return whether another process replaces it, so that the program need not be
        told.
        """
        if address >= 0:
            return False
        server = self._cluster.logical(address)
        chain = self.chains[server]
        if address not in chain:
            return bool(chain)
        led = chain[0] == address
        chain.remove(address)
        if chain:
            self.epochs[server] += led
            self._follow(server, led)
        return bool(chain)

    def close(self) -> None:
        """Write the number of dropped messages to the record."""
        seconds = self._runner.clock()
        for name, count in (("repeated_messages", self.repeated), ("fenced_messages", self.refused)):
            if count:
                self._runner.emit(ScalarEvent(seconds, self._address, name, count))

    def _follow(self, server: Address, moved: bool) -> None:
        """The chain of a server has changed; if the head has `moved`, send again what is not acknowledged."""
        if moved:
            for message in list(self.sent.get(server, ())):
                self._post_data(server, message)

    def _accepted(self, message: Message) -> Inner | None:
        """The message of a program in an envelope; None if there is none, or it is fenced or repeated."""
        note: Envelope = message.note
        if self._is_fenced(message.source, note.epoch):
            return None
        source = self._cluster.logical(message.source)
        self._note_acknowledged(source, note.acknowledged)
        return None if note.inner is None or self._is_repeated(source, note.inner.number) else note.inner

    def _is_fenced(self, source: Address, epoch: int) -> bool:
        """Refuse a message of a server that no longer leads; follow a head of which this node has not been told."""
        if source >= 0:
            return False
        server = self._cluster.logical(source)
        if epoch < self.epochs[server] or source not in self.chains[server]:
            self.refused += 1
            self._post(source, FENCED, Fenced(self.epochs[server]))
            return True
        if epoch > self.epochs[server]:
            chain = self.chains[server]
            del chain[: chain.index(source)]
            self.epochs[server] = epoch
            self._follow(server, True)
        return False

    def _is_repeated(self, source: Address, number: int) -> bool:
        """Whether the program has handled this message before; messages of one source arrive in order.

        Raises:
            ProtocolError: a message is missing.
        """
        last = self._last(source)
        if number > last + 1:
            raise ProtocolError(f"{node_name(source)} sent message {number} when message {last + 1} was expected")
        self.repeated += number <= last
        return number <= last

    def _last(self, source: Address) -> int:
        """Number of the last message of a program that this program has handled."""
        return self._runner.node.mailbox.received().get(source, 0)

    def _note_acknowledged(self, to: Address, number: int) -> None:
        """Forget the messages that another program has acknowledged."""
        kept = self.sent.get(to)
        while kept and kept[0].number <= number:
            kept.popleft()

    def _epoch_with(self, to: Address) -> int:
        """Epoch of the server that takes part in the exchange with node `to`."""
        return self.epochs[to]

    def _acknowledgment(self, to: Address) -> int:
        """Number of the last message of node `to` that can no longer be lost."""
        return self._last(to)

    def _post_data(self, to: Address, message: Message | None) -> None:
        """Send a program's message (None: only an acknowledgment) to the head of a server, or to a worker."""
        inner, array = (None, None) if message is None else (_packed(message), message.array)
        note = Envelope(self._epoch_with(to), self._acknowledgment(to), inner)
        self._post(self.chains[to][0] if to < 0 else to, DATA, note, array)

    def _post(self, to: Address, tag: str, note: Note, array: Array | None = None) -> None:
        self._numbers[to] += 1
        self._transmit(to, Message(self._address, tag, array, note, self._runner.node.step, self._numbers[to]))

    def _unpacked(self, inner: Inner, array: Array | None) -> Message:
        kind = note_kind(self._runner.node.notes, inner.tag, inner.reply_to)
        note = note_reader(kind).decode(inner.note)
        return Message(inner.source, inner.tag, array, note, inner.step, inner.number, inner.reply_to)


class ReplicatedServer(Endpoint):
    """A process of a replicated server: the head, or a backup."""

    def __init__(
        self, runner: ProgramRunner, cluster: Cluster, address: Address, transmit: Callable[[Address, Message], None]
    ):
        super().__init__(runner, cluster, address, transmit)
        self.position = 0
        """Number of entries of the log that this process has handled."""
        self.stored = 0
        """Number of entries that the rest of the chain has, too."""
        self._publish, runner.send_snapshot = runner.send_snapshot, self.snapshot
        self._server = runner.node.address
        self._log: deque[tuple[Logged, Array | None]] = deque()
        """Entries that the rest of the chain may lack."""
        self._held: deque[tuple[int, Address, Message]] = deque()
        """Messages of the program, each with the entry that the chain must have before the message may leave."""
        self._events: deque[tuple[int, Event]] = deque()
        """Events of the program, likewise: an entry that the chain lacks may come later in another order."""
        self._handled: deque[tuple[int, Address, int]] = deque()
        """Position, source and number of the messages in entries that the rest of the chain may lack."""
        self._safe: Counter[Address] = Counter()
        """Node → number of its last message that can no longer be lost."""
        self._owed: set[Address] = set()
        """Nodes that have not been told so."""
        self._waiting: deque[tuple[Message, float | None]] = deque()
        """Messages that have arrived before this process knew that it leads."""
        self._dead: list[Address] = []
        """Dead workers, which the log may lack if the head died."""
        self._released: set[Address] = set()
        """Workers whose clocks no longer count, because they have left."""
        self._promoted: float | None = None
        """Time at which this process became the head, until a push arrives."""
        self._snapshot: tuple[float, FlatArray] | None = None
        """Parameters at the newest tick of progress, which the head may not have sent before it died."""
        self._actions: deque[Callable[[], object]] = deque()
        self._acting = False
        self._emit, runner.metrics.emit = runner.metrics.emit, self.note
        runner.node.port_copies = False

    @property
    def leads(self) -> bool:
        """Whether this process is the head of its chain."""
        return self.chains[self._server][:1] == [self._address]

    @property
    def epoch(self) -> int:
        """Number of times that a backup has taken the place of this server's head."""
        return self.epochs[self._server]

    @property
    def unsettled(self) -> bool:
        """Whether messages have arrived that the rest of the chain may not have received."""
        return bool(self._log or self._held or self._waiting or self._actions)

    def send(self, to: Address, message: Message) -> None:
        """Queue a message of the program until the whole chain has stored every message on which it depends."""
        if message.array is not None:
            message.array = self._runner.node.freeze(message.array)
        self._held.append((self.position, to, message))
        if not self._acting:
            self._do(self._release)

    def note(self, event: Event) -> None:
        """Write an event to the record; an event of the program waits until the whole chain has stored every message on
        which it depends.
        """
        if isinstance(event, UpdateEvent | RefusedEvent):
            self._events.append((self.position, event))
        elif self._emit is not None:
            self._emit(event)

    def snapshot(self, tick: float) -> None:
        """Send a snapshot of the parameters if this process is the head; a backup keeps the newest snapshot."""
        if not self.leads:
            self._snapshot = tick, copied(self._runner.node.params)
        elif self._publish is not None:
            self._publish(tick)

    def take(self, message: Message, sent_at: float | None) -> None:
        """Handle a message from another process.

        Raises:
            PeerLost: another process is the head of this server.
            ProtocolError: an entry of the log is missing.
        """
        self._do(partial(self._take, message, sent_at))

    def loses(self, address: Address) -> bool:
        if address < 0:
            self._do(partial(super().loses, address))
            return any(one != address for one in self.chains[self._cluster.logical(address)])
        self._do(partial(self._lose_worker, address))
        return True

    def release(self, worker: Address) -> None:
        """Tell the program, once, that a worker has left, so that the program no longer waits for the worker's
        clock.
        """
        self._do(partial(self._release_worker, worker))

    def close(self) -> None:
        super().close()
        if self._promoted is not None:
            self._tell_promotion(None)

    def _do(self, action: Callable[[], object]) -> None:
        """Run an action; what arrives during an action is handled after it."""
        self._actions.append(action)
        if self._acting:
            return
        self._acting = True
        try:
            while self._actions:
                self._actions.popleft()()
        finally:
            self._acting = False

    def _take(self, message: Message, sent_at: float | None) -> None:
        match message.note:
            case Envelope():
                self._take_data(message, sent_at)
            case Logged():
                self._take_entry(message, sent_at)
            case Stored(position):
                self._commit(position)
            case Fenced(epoch):
                raise PeerLost(
                    f"{node_name(self._address)} was declared lost, and another process leads "
                    f"{node_name(self._server)} in epoch {epoch}; this process ends"
                )

    def _take_data(self, message: Message, sent_at: float | None) -> None:
        note: Envelope = message.note
        if not self.leads:
            self._waiting.append((message, sent_at))
            return
        inner = self._accepted(message)
        if inner is None:
            return
        if self._promoted is not None and message.array is not None:
            self._tell_promotion(self._runner.clock() - self._promoted)
        self._append(inner, message.array, sent_at, note.acknowledged)

    def _take_entry(self, message: Message, sent_at: float | None) -> None:
        """Handle an entry of the log, as a backup."""
        entry: Logged = message.note
        if message.source not in self.chains[self._server]:
            self.refused += 1
            self._post(message.source, FENCED, Fenced(self.epoch))
        elif entry.position <= self.position:
            self._post(message.source, STORED, Stored(self.stored))
        elif entry.position > self.position + 1:
            raise ProtocolError(
                f"{node_name(message.source)} sent entry {entry.position} of the log when entry {self.position + 1} "
                "was expected"
            )
        else:
            self._note_acknowledged(entry.inner.source, entry.acknowledged)
            self._handle(entry, message.array, sent_at)

    def _lose_worker(self, worker: Address) -> None:
        if self.leads:
            self._append(_left(worker), None, None, lost=True)
        else:
            self._dead.append(worker)

    def _release_worker(self, worker: Address) -> None:
        if self.leads and worker not in self._released:
            self._append(_left(worker), None, None)

    def _append(
        self, inner: Inner, array: Array | None, sent_at: float | None, acknowledged: int = 0, lost: bool = False
    ) -> None:
        """Append an entry to the log, as the head, and handle it."""
        self._handle(Logged(self.position + 1, acknowledged, inner, lost), array, sent_at)

    def _handle(self, entry: Logged, array: Array | None, sent_at: float | None) -> None:
        """Hand an entry on to the next process of the chain, and run the program with it."""
        inner, self.position = entry.inner, entry.position
        if (successor := self._neighbor(1)) is not None:
            self._log.append((entry, array))
            self._post(successor, LOG, entry, array)
        if entry.lost:
            self._runner.take_loss(inner.source)
        else:
            if inner.number:
                self._handled.append((entry.position, inner.source, inner.number))
            else:
                self._released.add(inner.source)
            self._runner.deliver(self._unpacked(inner, array), sent_at)
        if successor is None:
            self._commit(self.position)

    def _commit(self, position: int) -> None:
        """The rest of the chain has the log up to `position`: let the program's messages leave, and acknowledge."""
        if position <= self.stored:
            return
        self.stored = position
        while self._log and self._log[0][0].position <= position:
            self._log.popleft()
        while self._handled and self._handled[0][0] <= position:
            _, source, number = self._handled.popleft()
            self._safe[source] = number
            self._owed.add(source)
        self._release()
        if (predecessor := self._neighbor(-1)) is not None:
            self._post(predecessor, STORED, Stored(position))

    def _release(self) -> None:
        """Send the messages that may leave, as the head; a backup keeps them until they are acknowledged."""
        while self._held and self._held[0][0] <= self.stored:
            _, to, message = self._held.popleft()
            if not self.leads or to < 0:
                self.sent.setdefault(to, deque()).append(message)
            if self.leads:
                self._post_data(to, message)
        while self._events and self._events[0][0] <= self.stored:
            _, event = self._events.popleft()
            if self._emit is not None:
                self._emit(event)
        for source in sorted(self._owed) if self.leads else ():
            self._post_data(source, None)

    def _follow(self, server: Address, moved: bool) -> None:
        if server != self._server:
            if self.leads:
                super()._follow(server, moved)
            return
        if moved and self.leads:
            self._lead()
        if (successor := self._neighbor(1)) is None:
            self._commit(self.position)
        else:
            for entry, array in list(self._log):
                self._post(successor, LOG, entry, array)
        if (predecessor := self._neighbor(-1)) is not None:  # what was said to a lost process between the two
            self._post(predecessor, STORED, Stored(self.stored))

    def _lead(self) -> None:
        """Take the place of the head: send again what receivers may lack, then handle what has waited."""
        reach("replica.promoted")
        self._promoted = self._runner.clock()
        for to, kept in self.sent.items():
            for message in list(kept):
                self._post_data(to, message)
        self.sent = {to: kept for to, kept in self.sent.items() if to < 0}
        if self._snapshot is not None and self._publish is not None:
            self._publish(*self._snapshot)
        if self._runner.done:
            self._tell_promotion(None)
        for worker in self._dead:
            if worker not in self._runner.node.lost:
                self._actions.append(partial(self._lose_worker, worker))
        self._actions.extend(partial(self._take, *one) for one in self._waiting)
        self._waiting.clear()

    def _tell_promotion(self, seconds: float | None) -> None:
        assert self._promoted is not None
        self._runner.emit(PromotedEvent(self._promoted, self._server, self._address, self.epoch, seconds))
        self._promoted = None

    def _neighbor(self, steps: int) -> Address | None:
        """The next (1) or the previous (-1) process of this server's chain; None if there is none."""
        chain = self.chains[self._server]
        place = chain.index(self._address) + steps
        return chain[place] if 0 <= place < len(chain) else None

    def _epoch_with(self, to: Address) -> int:
        return self.epoch

    def _acknowledgment(self, to: Address) -> int:
        self._owed.discard(to)
        return self._safe[to]


class ProgramEvents:
    """Writes each event of a replicated server's program to the record once, although every process of the server
    reports the event.

    The processes of a server report the same events in the same order.
    """

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self._seen: Counter[Address] = Counter()
        self._kept: Counter[Address] = Counter()

    def once(self, address: Address, event: Event) -> Event | None:
        """Return the event with the address of its server; None if another process has already reported the event."""
        if address >= 0 or not self._cluster.replicas or not isinstance(event, UpdateEvent | RefusedEvent):
            return event
        server = self._cluster.logical(address)
        self._seen[address] += 1
        if self._seen[address] <= self._kept[server]:
            return None
        self._kept[server] += 1
        return msgspec.structs.replace(event, node=server)


def replicate(
    runner: ProgramRunner, cluster: Cluster, address: Address, transmit: Callable[[Address, Message], None]
) -> Endpoint | None:
    """Return the object through which the node of `runner` exchanges messages with replicated servers; None if servers
    have no backups.

    `address` is the address of this process; `transmit` sends a message to another process.
    """
    if not cluster.replicas:
        return None
    if address != runner.node.address:
        runner.metrics.backup_of = runner.node.address
    kind = ReplicatedServer if isinstance(runner.node, Server) else Endpoint
    return kind(runner, cluster, address, transmit)


def _packed(message: Message) -> Inner:
    """A program's message without its array."""
    note = msgspec.msgpack.encode(message.note)
    return Inner(message.source, message.tag, message.number, message.reply_to, message.step, note)


def _left(worker: Address) -> Inner:
    """What tells a program that a worker is dead, or that its clock no longer counts; it has no number."""
    return _packed(Message(worker, LEAVE, note={"lost": 1}))
