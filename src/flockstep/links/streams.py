"""A bus over stream sockets: Unix sockets on one host, TCP between hosts; large arrays in memory that nodes share.

Each pair of nodes has one connection. Every message on it is a prefix (length of the header, length of the payload,
number of bytes that have arrived from the other end), the header and the payload; a prefix without a header only
acknowledges bytes, or says that the sender leaves. The first message in each direction is a greeting; nothing else is
read before a valid greeting has arrived. A payload is written to the socket from its own memory as long as the socket
accepts it, and copied only when it has to wait, or has not been acknowledged. It is received directly into the
program's array, or into a reused buffer.

Between hosts a connection that breaks is opened again, and both ends go on with the next byte of their session. A peer
is unreachable once its link has been down for longer than the link timeout, or nothing listens at its address any more.
Within a host a connection breaks only if a process ends, so no bytes are kept to be sent again.

Over TCP nothing is allocated for a connection before the other end has proved that it knows the run's secret; the
number of connections without a proof is bounded, and each has a deadline.

While the program computes, a thread receives and sends as far as the sockets allow. A signal handler may raise at any
point: if that happens while bytes are moved, the connection is closed, because the number of moved bytes is unknown.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import math
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Collection, Container, Mapping
from threading import Lock, Thread

import numpy as np

from flockstep.errors import CompositionError, ConfigurationError, PeerLost, ProtocolError
from flockstep.links.addresses import connecting, host_of, is_loopback, listening, tcp_address
from flockstep.links.bus import Backlog, Traffic
from flockstep.links.connection import (
    ACKNOWLEDGED,
    LINK_TIMEOUT,
    STAGING,
    UNPROVED,
    Dial,
    LinkSession,
    PeerLink,
    excess,
)
from flockstep.links.copies import BufferPool
from flockstep.links.handshake import time_for_proof
from flockstep.links.sealed import LinkForged, SealedSocket
from flockstep.links.shared_heap import NODES, SMALLEST, PeerMemory, SharedHeap, heap_room_for
from flockstep.links.wire import (
    GREETING,
    MAX_CODING,
    MAX_HEADER,
    Greeting,
    SenderIdentity,
    announces,
    decode,
    decode_greeting,
    encode,
)
from flockstep.messages import Address, Array, Message, Wanted, node_name

BESIDE = "\t"
"""Separates an address from the location of the memory beside it; a path may contain spaces."""
QUEUED = 10_000
"""Maximum number of messages queued for one peer; a sender waits while the queue is full."""
AHEAD = 1 << 26
"""Maximum number of bytes queued for one peer; a sender waits while the queue is full."""
UNREAD = 1 << 28
"""Largest number of bytes of messages that are received before the program asks for them."""
LOCAL_BUFFER = 1 << 20
"""Size in bytes of the system's buffers of a Unix socket; with larger buffers, data in transit no longer fits the
processor's caches. Over TCP the system chooses the size from throughput and delay, which a fixed size would prevent.
"""
USUAL_HEADER = 256
"""Number of bytes of the first read of a message if a large payload is expected: only enough for the header, so that
the payload can be received in place.
"""
REDIALS = 6
"""Number of times that a node tries again to connect to a peer whose connections end before the peer's greeting."""
FIRST_WAIT = 0.05
"""Seconds before the second attempt to connect to a peer; each further wait is twice as long."""
JOINED = 1 << 13
"""Size in bytes below which a payload is copied behind its header, because that costs less than sending two parts."""
BRIEF = 0.001
"""Seconds that a sender waits for a socket without progress before the rest of the message is copied and queued."""
FAST = 1e9
"""Throughput in bytes per second below which a sender does not wait for a connection."""
GREETING_BYTES = 1 << 10
"""Largest size in bytes of a header on a connection that has not yet received a greeting."""
TICK = 0.01
"""Seconds between two polls of the sockets while the program computes."""
CHECKS = 4
"""Number of times per heartbeat timeout that a node looks for silent connections, and acknowledges received bytes if it
has nothing to send.
"""
LONGEST_WAIT = 1.0
"""Longest time in seconds between two attempts to connect again to a peer whose connection broke."""
_PREFIX = struct.Struct("<IQQ")
_LEAVES, _GAVE_UP = 1, 2
"""Length of the payload in a prefix without a header, if the sender leaves, or if it has given up the session that the
receiver wants to continue.
"""
_PAYLOAD = 1 << 31
"""Bit in the length of the header: a payload follows, which may be empty."""
_log = logging.getLogger(__name__)


class LinkLog:
    """Reports what happens to the connections of a node, as warnings in Python's log."""

    def refused(self, me: Address, host: str, begun: bool, why: str, first: bool) -> None:
        """Report a connection that node `me` has refused: numeric address of the other end, and whether it has sent a
        hello of flockstep.
        """
        if first:
            source = f" from {host}" if host else ""
            words = node_name(me), source, why
            _log.warning("flockstep: %s refused a connection%s: %s; later refused connections are only counted", *words)

    def resumed(self, me: Address, peer: Address, seconds: float, why: str, nbytes: int) -> None:
        """Report a connection that was interrupted for `seconds` and is open again."""
        _log.warning(
            "flockstep: %s is connected to %s again after %.1f s (%s); %d bytes are sent again",
            *(node_name(me), node_name(peer), seconds, why, nbytes),
        )


LOG = LinkLog()


class StreamBus:
    """A node's connections to its peers, one connection for each peer; messages arrive in order for each pair of nodes.

    `address` is where peers connect; `traffic` counts the messages exchanged with peers, without greetings.
    """

    _listener: socket.socket | None = None
    _own = ""
    """Address of this host from which connections are opened; empty for any."""
    _returns_within = math.inf
    """Seconds within which a peer that closed its connection must have opened another one."""
    _expected: Container[Address] | None = None
    """The peers that may connect; None until they are known."""
    _also: Collection[int] = ()
    _alarm = -1
    """Descriptor by which the thread that serves the sockets wakes whoever waits for `fileno`."""
    _unread = 0
    """Bytes of the messages in the inbox."""
    _asked = False
    """Whether the program waits for the lock."""
    _closed = _woken = False
    _wanted: Wanted | None = None
    """The message that the program waits for, if there is a place for its array."""
    _placing: PeerLink | None = None
    """The connection on which an array arrives in that place."""
    _placed: Message | None = None
    """The message whose array arrived in that place, once the message is in the inbox."""

    def __init__(
        self,
        me: SenderIdentity,
        address: str | socket.socket | None,
        zero_copy: bool = False,
        encrypts: bool = False,
        heartbeat: float = 5.0,
        link_timeout: float = LINK_TIMEOUT,
        local_sessions: bool = False,
        log: LinkLog = LOG,
    ):
        """Listen at `address`, ipc://PATH or tcp://HOST:PORTS, where * is any free port.

        Both ends of a TCP connection must prove that they know the secret of `me`.

        Args:
            me: this node.
            address: where to listen, or a TCP socket that listens already; None for a node that only connects by TCP.
            zero_copy: whether peers may read this node's memory.
            encrypts: whether TCP connections are encrypted.
            heartbeat: seconds of silence after which a TCP connection is opened again.
            link_timeout: seconds for which the TCP connection to another host may be away before the peer is
                unreachable.
            local_sessions: whether connections within a host are opened again too.
            log: what is told of refused and resumed connections.

        Raises:
            ConfigurationError: it is not possible to listen at the address, or it is a TCP address and `me` has no
                secret.
        """
        if isinstance(address, socket.socket):
            self._listener, self.address = address, tcp_address(*address.getsockname()[:2])
        else:
            self.address = address or ""
        self._host = host_of(self.address)
        self._tcp = not self.address.startswith("ipc:")
        if self._tcp and not me.secret:
            raise ConfigurationError(
                f"{node_name(me.address)} cannot listen on {address} without a secret, because any user could "
                "connect; give every node of the run the same secret, or use --transport ipc on one host"
            )
        self.traffic, self._log = Traffic(), log
        self._heartbeat, self._proof_time = heartbeat, time_for_proof(heartbeat)
        self._link_timeout, self._local_sessions = link_timeout, local_sessions
        self._me = me
        self._encrypts = encrypts
        self._copies = BufferPool()
        self._heap = SharedHeap(heap_room_for(me.model_bytes)) if zero_copy else None
        self._epoll = select.epoll()
        if isinstance(address, str):
            self._listener, self.address = listening(address, heartbeat)
        if self._listener is not None:
            self._epoll.register(self._listener, select.EPOLLIN)
        self._lent: set[Address] = set()
        self._connections: dict[int, PeerLink] = {}
        self._peers: dict[Address, PeerLink] = {}
        self._dials: dict[Address, Dial] = {}
        """Peer that this node connects to → its attempts, until the peer has greeted."""
        self._ended: dict[Address, tuple[float, str]] = {}
        """Peer → time at which its connection ended, in seconds of the monotonic clock, and why none was opened."""
        self._failures: dict[Address, str] = {}
        """Peer that this node connects to → why the last attempt failed."""
        self._inbox: deque[Message | ProtocolError] = deque()
        self._alarms: list[tuple[float, int, Message]] = []
        """Heap of messages of this node to itself: time at which each is due, and its number."""
        self._lock = Lock()
        """Held by the thread that moves bytes: the program's, or the one that serves the sockets meanwhile."""
        self._next_look = 0.0 if self._tcp else math.inf
        """Time of the next `_look`, in seconds of the monotonic clock."""
        if self._heap is not None:
            self.address += BESIDE + self._heap.location

    def connect(self, peers: Mapping[Address, str], own: str = "") -> None:
        """Connect to the peers with lower addresses, from the address `own` of this host if one is given; peers with
        higher addresses connect to this node. Call `poll` until all peers are `reachable`.
        """
        self._own = own
        if self._heap is not None and len(peers) < NODES:
            for peer, address in peers.items():
                with contextlib.suppress(CompositionError):  # on another host: its messages go through the socket
                    self._me.peer_memory[peer] = PeerMemory(address.partition(BESIDE)[2], self._me.address)
        with self._lock:
            self._expected = set(peers)
            for connection in list(self._connections.values()):
                self._admit(connection)
            now = time.monotonic()
            self._dials = {}
            for peer, address in peers.items():
                if peer < self._me.address:
                    where = address.partition(BESIDE)[0]
                    host = host_of(where)
                    resumes = host and (self._local_sessions or not self._is_here(host))
                    self._dials[peer] = Dial(where, secrets.token_hex(16) if resumes else "", now)
            self._look(math.inf)
        self._start()

    def open(self, returns_within: float) -> None:
        """Accept every peer with a higher address that knows the secret.

        A peer that has closed its connection is unreachable if it does not connect again within `returns_within`
        seconds, also if the link timeout is longer: then its process has ended.
        """
        with self._lock:
            self._expected, self._returns_within = range(self._me.address + 1, 1 << 62), returns_within
        self._start()

    def _start(self) -> None:
        Thread(target=_attend, args=(weakref.ref(self),), name="flockstep-bus", daemon=True).start()

    def set_limits(self, heartbeat: float, link_timeout: float) -> None:
        """Change the heartbeat timeout and the link timeout, in seconds."""
        with self._lock:
            self._heartbeat, self._link_timeout = heartbeat, link_timeout

    def fileno(self) -> int:
        """Return a file descriptor that is readable when `poll` may have a message or sockets may proceed."""
        if self._alarm < 0:
            self._alarm = os.eventfd(0, os.EFD_NONBLOCK)
            self._epoll.register(self._alarm, select.EPOLLIN)
        return self._epoll.fileno()

    def _is_here(self, host: str) -> bool:
        """Whether a connection to that host stays within this host."""
        return host in ("", self._host) or is_loopback(host)

    def disconnect(self, peer: Address) -> None:
        """Close the connection to a peer that was lost, and free the memory that the peer could read."""
        self._copies.lost.add(peer)
        with self._lock:
            self._dials.pop(peer, None)
            if peer in self._peers:
                self._drop(self._peers[peer])

    def reachable(self, peer: Address) -> bool:
        """Return whether the connection to the peer is established, or may return."""
        return peer in self._peers and self._peers[peer].usable()

    def connected(self, peer: Address) -> bool:
        """Return whether the connection to the peer is open at this time; `reachable` is true while it may return."""
        return peer in self._peers and self._peers[peer].connected()

    def obstacle(self, peer: Address) -> str:
        """Return why a peer is not reachable, as far as is known; empty before an attempt to connect has failed."""
        if peer in self._peers:
            return self._peers[peer].why
        awaited = any(one.wanted == peer and not one.has_output() for one in list(self._connections.values()))
        return "connected, but no answer has come yet" if awaited else self._failures.get(peer, "")

    def backlog(self, peer: Address) -> int:
        """Return the number of bytes for the peer that wait to be sent or that it has not acknowledged."""
        connection = self._peers.get(peer)
        session = None if connection is None else connection.session
        return self.waiting(peer) + (0 if session is None else session.unacknowledged)

    def waiting(self, peer: Address) -> int:
        """Return the number of bytes that wait in this process to be sent to the peer."""
        connection = self._peers.get(peer)
        return connection.waiting if connection is not None and connection.usable() else 0

    def broken(self, seconds: float) -> set[Address]:
        """Return the peers whose connection broke at least `seconds` ago, for any reason."""
        latest = time.monotonic() - seconds
        return {peer for peer, (at, _) in self._ended.items() if at <= latest}

    def why_broken(self, peer: Address) -> str:
        """Return the reason why the connection to a peer ended, as a sentence without a final period."""
        connection, (_, unopened) = self._peers.get(peer), self._ended.get(peer, (0.0, ""))
        broke = unopened or f"the connection to {node_name(peer)} broke"
        return broke if connection is None or not connection.why else f"{broke}: {connection.why}"

    def copy_for_sending(self, array: Array) -> Array:
        """Return a read-only copy of the array, in shared memory if there is room, otherwise in a reused buffer."""
        return self._copies.frozen(array)

    def release(self) -> None:
        """Give the memory of sent and received arrays to which nothing refers any more back to the system."""
        with self._lock:
            self._copies.release()

    def send(self, to: Address, message: Message) -> None:
        """Send a message to a peer without waiting.

        The caller may change the array afterwards, unless `copy_for_sending` returned the array.

        Raises:
            Backlog: too many messages or bytes are queued for the peer; the same message may be sent again later.
            PeerLost: the peer is not connected.
        """
        connection = self._peers.get(to)
        if connection is None or not connection.usable():
            raise self._unreachable(to)
        waiting, session = connection.waiting, connection.session
        if session is not None:
            waiting += session.sent - session.acknowledged
        if len(connection.out) >= 2 * QUEUED or waiting >= AHEAD:
            raise Backlog(f"{node_name(to)} does not accept messages: {waiting} bytes wait for delivery")
        array, place, start = message.array, None, 0
        if array is not None and self._heap is not None and array.nbytes >= SMALLEST and to in self._lent:
            array = message.array = self._copies.frozen(array)
            if (place := self._heap.place(array)) is not None:
                start, array = self._heap.sent(place, to), None
        header = encode(message, self._me, -1 if place is None else place, start)
        self._asked = True
        with self._lock:
            self._asked = False
            self._write(connection, header, array)
        if not connection.usable():
            raise self._unreachable(to)
        self.traffic.sent(message.payload_bytes, len(header))

    def later(self, seconds: float, message: Message) -> None:
        """Let `poll` return a message of this node to itself after so many seconds."""
        heapq.heappush(self._alarms, (time.monotonic() + seconds, message.number, message))

    def poll(self, seconds: float | None, also: Collection[int] = (), wanted: Wanted | None = None) -> Message | None:
        """Return the next message; None if none arrived within `seconds` or a descriptor of `also` became readable.

        Args:
            seconds: time limit; None waits without limit.
            also: file descriptors that end the wait when they become readable.
            wanted: the message that the caller expects. Its array may be received directly into `wanted.place`; then
                the message's array is that place.

        Raises:
            ProtocolError: a peer sent a message that breaks the protocol.
        """
        self._asked = True
        with self._lock:
            self._asked = False
            if also != self._also:
                self._watch(also)
            if self._alarms:
                seconds = self._ring(seconds)
            if not self._inbox:
                self._wait(seconds, wanted)
                if self._alarms:
                    self._ring(0)
                if not self._inbox:
                    return None
            message = self._inbox.popleft()
            if not isinstance(message, Message):
                raise message
            self._unread -= message.payload_bytes
        self.traffic.received(message.payload_bytes)
        return message

    def _ring(self, seconds: float | None) -> float:
        """Put what is due in the inbox; return the seconds until the next alarm, at most `seconds`."""
        now = time.monotonic()
        while self._alarms and self._alarms[0][0] <= now:
            self._inbox.append(heapq.heappop(self._alarms)[2])
        left = self._alarms[0][0] - now if self._alarms else math.inf
        return left if seconds is None else min(left, seconds)

    def _wait(self, seconds: float | None, wanted: Wanted | None) -> None:
        """Wait for the next message, and receive its array in the wanted place.

        Afterwards nothing is written to that place.
        """
        now = time.monotonic()
        until = math.inf if seconds is None else now + seconds
        self._look(now)
        self._woken = False
        place = None if wanted is None else wanted.place
        if isinstance(place, np.ndarray) and place.ndim == 1 and place.flags.c_contiguous:
            self._wanted = wanted
        try:
            while True:
                end = min(until, self._next_look)
                self._move(None if end == math.inf else max(0.0, end - now))
                if self._inbox or self._woken or (now := time.monotonic()) >= until:
                    break
                self._look(now)
        finally:
            if self._wanted is not None:
                # What arrives in the wanted place, but is not returned to the program now, moves to other memory.
                placed, placing, self._wanted, self._placed, self._placing = (
                    self._placed,
                    self._placing,
                    None,
                    None,
                    None,
                )
                if placed is not None and self._inbox[0] is not placed:
                    placed.array = self._copies.frozen(placed.payload)
                if placing is not None and placing.body is not None:
                    body = self._copies.room(placing.body.nbytes).data
                    body[: placing.filled] = placing.body[: placing.filled]
                    placing.body = body

    def close(self, linger: float) -> None:
        """Close all connections after delivering queued messages for up to `linger` seconds."""
        until = time.monotonic() + linger
        with self._lock:
            last = dict[PeerLink, int]()
            for one in self._peers.values():
                if one.session is not None and one.connected():
                    self._acknowledge(one, _LEAVES)
                    last[one] = one.session.sent + one.waiting
            self._closed = True
            while time.monotonic() < until and any(
                one.has_output() or (one.session is not None and one.session.acknowledged < last.get(one, 0))
                for one in self._connections.values()
            ):
                self._move(BRIEF)
            for connection in list(self._connections.values()):
                with contextlib.suppress(OSError):
                    connection.socket.shutdown(socket.SHUT_WR)
                self._drop(connection)
            if self._listener is not None:
                with contextlib.suppress(OSError):  # a process that this one has forked may keep the socket open
                    self._listener.shutdown(socket.SHUT_RDWR)
                self._listener.close()
            self._epoll.close()
            if self._alarm >= 0:
                os.close(self._alarm)
            self._heap, self._copies = None, BufferPool()  # shared memory lasts as long as an array in it
            self._me.peer_memory.clear()
            self._inbox.clear()

    def attend(self) -> bool:
        """Receive and send as much as the sockets allow while the program computes; return whether to call this
        again.
        """
        if not self._asked and self._lock.acquire(blocking=False):
            try:
                if not self._closed:
                    self._look(time.monotonic())
                while self._may_attend() and self._move(0):
                    pass
                if self._inbox and self._alarm >= 0 and not self._closed:
                    os.eventfd_write(self._alarm, 1)
            finally:
                self._lock.release()
        self._asked = False
        return not self._closed

    def _may_attend(self) -> bool:
        return not (self._closed or self._asked or self._unread > UNREAD)

    def _look(self, now: float) -> None:
        """Connect again to peers where that is due; look for connections that are silent, unproved or away too long."""
        if now < self._next_look:
            return
        now = min(now, time.monotonic())
        late = now > self._next_look + self._heartbeat / 2  # this process itself was busy or stopped
        for peer, dial in list(self._dials.items()):
            if now >= dial.due:
                self._dial(peer, dial)
        for connection in list(self._connections.values()) if self._tcp else ():
            self._check(connection, now, late)
        for peer, connection in self._peers.items() if self._tcp else ():
            limit, which = self._link_timeout, "link timeout"
            if connection.closed and connection.wanted is None and self._returns_within < limit:
                limit, which = self._returns_within, "time for a new connection"
            if connection.open and now > connection.down + limit:
                away = f"the link was down for {now - connection.down:.1f} s, longer than the {which} of {limit:g} s"
                self._give_up(peer, f"{connection.why}, and {away}")
        due = min((dial.due for dial in self._dials.values()), default=math.inf)
        self._next_look = min(due, now + self._heartbeat / CHECKS if self._tcp else math.inf)

    def _check(self, connection: PeerLink, now: float, late: bool) -> None:
        """Interrupt a connection on which nothing arrives, acknowledge if this end had nothing to send, and close a
        connection whose other end has not proved in time that it belongs to this run. `late`: whether this process did
        not look in time.
        """
        session = connection.session
        if session is not None:
            heard, received, sent = connection.checked
            if late or session.received != received or self._unread > UNREAD:
                heard = now
            elif now > heard + self._heartbeat:
                self._interrupt(connection, f"nothing arrived for {now - heard:.1f} s")
                return
            if session.sent + connection.waiting == sent:
                self._acknowledge(connection)
            connection.checked = heard, session.received, session.sent + connection.waiting
        elif connection.wanted in self._peers and self._peers[connection.wanted] is not connection:
            if now > connection.since + self._heartbeat:  # the next attempt to go on with the session may be answered
                self._drop(connection)
        elif not connection.established and now > connection.since + self._proof_time:
            self._read(connection)  # the proof may have arrived while this process could not read it
            if connection.open and not connection.established:
                self._end_unproved(
                    connection,
                    f"the other end did not prove within {self._proof_time:g} s that it knows the secret",
                )

    def _acknowledge(self, connection: PeerLink, leaves: int = 0) -> None:
        """Tell the peer how many bytes have arrived, and whether this node leaves."""
        assert connection.session is not None
        connection.session.told = connection.session.received
        self._flush(connection, memoryview(_PREFIX.pack(0, leaves, connection.session.received)))

    def _interrupt(self, connection: PeerLink, why: str) -> None:
        """The connection of a session broke: the end that opened it opens another one."""
        assert connection.greeting is not None
        self._unplug(connection)
        connection.down, connection.why, connection.deaf, connection.closed = time.monotonic(), why, False, False
        if connection.wanted is not None:
            assert connection.session is not None
            self._dials[connection.wanted] = Dial(connection.where, connection.session.key, connection.down)
            self._next_look = min(self._next_look, connection.down)

    def _break(self, connection: PeerLink, why: str) -> None:
        """The other end has closed the connection, or the system has."""
        if connection.session is None or connection.left or self._closed:
            if connection.session is not None:
                connection.why = why
            self._drop(connection)
        elif connection.connected():
            self._interrupt(connection, why)
            connection.closed = True

    def _give_up(self, peer: Address, why: str) -> None:
        """End the session with a peer."""
        self._dials.pop(peer, None)
        self._peers[peer].why = why
        self._drop(self._peers[peer])

    def _unreachable(self, peer: Address) -> PeerLost:
        return PeerLost(f"{node_name(peer)} is not reachable from {node_name(self._me.address)}")

    def _move(self, seconds: float | None) -> int:
        """Let all sockets that are ready proceed, within that time; return the number of sockets that did."""
        moved = 0
        if self._encrypts:  # of a record that was decrypted, a part may have been left when a handler raised
            for one in [one for one in self._connections.values() if one.has_input()]:
                self._drain(one)
                moved += 1
        for descriptor, what in self._epoll.poll(0 if moved else seconds):
            connection = self._connections.get(descriptor)
            if connection is not None:
                moved += 1
                if what & select.EPOLLOUT:
                    self._flush(connection)
                if what & ~select.EPOLLOUT and connection.open:
                    self._read(connection)
                if isinstance(connection.socket, SealedSocket):
                    self._drain(connection)
            elif self._listener is not None and descriptor == self._listener.fileno():
                self._accept()
            else:
                if descriptor == self._alarm:
                    os.eventfd_read(descriptor)
                self._woken = True
        return moved

    def _drain(self, connection: PeerLink) -> None:
        """Read what was decrypted already, and send what the encryption had held back."""
        while connection.connected() and connection.has_input():
            self._read(connection)
        if connection.connected():
            self._flush(connection)

    def _watch(self, also: Collection[int]) -> None:
        for descriptor in self._also:
            with contextlib.suppress(OSError):  # the connection was closed meanwhile
                self._epoll.unregister(descriptor)
        for descriptor in also:
            self._epoll.register(descriptor, select.EPOLLIN)
        self._also = also

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, where = self._listener.accept()
        except OSError as error:  # the other end has closed the connection
            if not _by_system(error):
                raise
            return
        self._add(sock, where[0] if self._tcp else "", None)
        surplus = excess([one for one in self._connections.values() if one.wanted is None])
        if surplus is not None:
            late = "connections were open whose other end had not proved yet that it knows the secret"
            self._reject(surplus, f"more than {UNPROVED} {late}")

    def _add(self, sock: socket.socket, host: str, wanted: Address | None) -> PeerLink:
        sock.setblocking(False)
        if not host:
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                sock.setsockopt(socket.SOL_SOCKET, option, LOCAL_BUFFER)
        purpose = f"{self._me.run} {node_name(self._me.address if wanted is None else wanted)}"
        link = SealedSocket(sock, self._me.secret, wanted is not None, self._encrypts, purpose) if host else sock
        connection = self._connections[sock.fileno()] = PeerLink(link, host, wanted)
        self._epoll.register(sock, select.EPOLLIN)
        self._flush(connection)
        return connection

    def _dial(self, peer: Address, dial: Dial) -> None:
        """Connect to a peer and greet it; both go on as far as the socket allows, with the other connections."""
        dial.count += 1
        dial.due = math.inf
        try:
            sock = connecting(dial.address, self._heartbeat, self._own)
        except OSError as error:
            if not _by_system(error):
                raise
            self._failures[peer] = error.strerror or str(error)
            self._redial(peer, isinstance(error, ConnectionRefusedError))
            return
        connection = self._add(sock, host_of(dial.address), peer)
        connection.where = dial.address
        self._greet(connection, peer, dial.key)

    def _redial(self, peer: Address, refused: bool = False) -> None:
        """Let the next attempt to connect to a peer be due soon, or give the peer up."""
        now, dial = time.monotonic(), self._dials.get(peer)
        again = peer in self._peers
        if again and dial is not None and refused:
            self._give_up(peer, f"{self._peers[peer].why}, and nothing listens at {dial.address} any more")
            return
        limit = math.inf if dial is None else dial.since + self._proof_time
        if dial is None or peer in self._ended or (not again and (dial.count > REDIALS or now > limit)):
            why = ""
            if dial is not None and not again:
                tried = f"{dial.count} attempts in {now - dial.since:.0f} s"
                why = f"{node_name(peer)} did not answer at {dial.address} ({tried})"
            self._dials.pop(peer, None)
            self._ended.setdefault(peer, (now, why))
            return
        dial.due = now + min(FIRST_WAIT * 2 ** (dial.count - 1), LONGEST_WAIT if again else math.inf)
        self._next_look = min(self._next_look, dial.due)

    def _greet(self, connection: PeerLink, peer: Address, key: str) -> None:
        """Send a greeting over a connection to a peer with whom this node has the session `key`."""
        current = self._peers.get(peer)
        received = 0 if current is None or current.session is None else current.session.received
        note = Greeting(peer in self._me.peer_memory, key, received)
        self._write(connection, encode(Message(self._me.address, GREETING, note=note), self._me), None)

    def _admit(self, connection: PeerLink) -> None:
        """Accept or reject a connection that has greeted, once the expected peers are known."""
        if connection.greeting is None or self._expected is None or not connection.open:
            return
        peer, wanted = connection.greeting.source, connection.wanted
        key = connection.greeting.note.session
        due = peer in self._expected and peer > self._me.address if wanted is None else peer == wanted
        current = self._peers.get(peer)
        if due and current is not None and current.open and current.session is not None and current.session.key == key:
            self._resume(current, current.session, connection, peer)
            return
        if not due or current is not None:
            if current is not None and key and not current.open:
                self._flush(connection, memoryview(_PREFIX.pack(0, _GAVE_UP, 0)))
            self._reject(connection, f"{node_name(peer)} is not part of this run, or is connected already")
            return
        self._dials.pop(peer, None)
        if wanted is None:
            self._greet(connection, peer, key)
            if connection.out:  # the peer connects again
                self._drop(connection)
                return
        self._peers[peer] = connection
        if key and self._tcp:
            connection.session = LinkSession(key)
        if self._heap is not None and connection.greeting.note.memory:
            self._lent.add(peer)
            self._copies.heap = self._heap

    def _resume(self, connection: PeerLink, session: LinkSession, fresh: PeerLink, peer: Address) -> None:
        """Go on with a session on a fresh connection, from the bytes that have arrived at either end."""
        assert fresh.greeting is not None
        try:
            again = session.rewind(fresh.greeting.note.received)
        except ProtocolError as error:
            self._drop(fresh)
            self._refuse(connection, error)
            return
        if connection.connected():
            self._interrupt(connection, "the peer opened a new connection")
        count = sum(part.nbytes for part in again)
        connection.out.extendleft(reversed(again))
        connection.waiting += count
        if fresh.wanted is None:
            self._greet(fresh, peer, session.key)
            if fresh.out:  # the peer connects again
                self._drop(fresh)
                return
        self._dials.pop(peer, None)
        fresh.open = False
        connection.socket, connection.armed = fresh.socket, fresh.armed
        self._connections[fresh.socket.fileno()] = connection
        now, session.told = time.monotonic(), session.received
        self.traffic.resumed += 1
        self._log.resumed(self._me.address, peer, now - connection.down, connection.why, count)
        connection.down, connection.checked = math.inf, (now, 0, 0)
        self._flush(connection)

    def _end_unproved(self, connection: PeerLink, why: str) -> None:
        """Close a connection whose other end is not proved: the peer may be tried again, a stranger is rejected."""
        if connection.wanted is None:
            self._reject(connection, why)
        else:
            self._failures[connection.wanted] = why
            self._drop(connection)

    def _reject(self, connection: PeerLink, why: str) -> None:
        """Refuse a connection for good, and count it."""
        first = not self.traffic.rejected
        self._log.refused(self._me.address, connection.host, connection.begun, why, first)
        self.traffic.rejected += 1
        if connection.wanted is not None:
            self._failures[connection.wanted] = why
            self._ended.setdefault(connection.wanted, (time.monotonic(), ""))
        self._drop(connection)

    def _drop(self, connection: PeerLink) -> None:
        if connection.open:
            connection.open = False
            connection.out.clear()
            connection.body = connection.session = None
            self._unplug(connection)
            self._woken = True
            self._note_end(connection)

    def _unplug(self, connection: PeerLink) -> None:
        """Close the socket of a connection, unless it is closed."""
        descriptor = connection.socket.fileno()
        if self._connections.get(descriptor) is connection:
            del self._connections[descriptor]
            self._epoll.unregister(connection.socket)
            connection.socket.close()
            connection.armed = False

    def _note_end(self, connection: PeerLink) -> None:
        if connection.greeting is not None:
            peer = connection.greeting.source
            if self._peers.get(peer) is connection or connection.wanted == peer:
                self._ended.setdefault(peer, (time.monotonic(), ""))
        elif connection.wanted is not None and not (connection.open or self._closed):
            self._redial(
                connection.wanted, connection.refused
            )  # while the connection is open, a greeting can still be read

    def _write(self, connection: PeerLink, header: bytes, array: Array | None) -> None:
        """Write a message; what the peer has not acknowledged soon is copied if the array can change."""
        session, arrived = connection.session, 0
        if session is not None:
            arrived = session.told = session.received
        if array is None or array.nbytes < JOINED:
            follows, data = (0, b"") if array is None else (_PAYLOAD, array.tobytes())
            self._flush(connection, memoryview(_PREFIX.pack(len(header) | follows, len(data), arrived) + header + data))
            return
        payload = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        prefix = _PREFIX.pack(len(header) | _PAYLOAD, payload.nbytes, arrived)
        connection.writing = True
        try:
            self._flush(connection, memoryview(prefix + header), payload)
            if connection.out and payload.nbytes >= SMALLEST:
                until = time.monotonic() + BRIEF + payload.nbytes / FAST
                while connection.out and self._move(BRIEF) and time.monotonic() < until:
                    pass
        finally:
            connection.writing = False
            if (connection.out or session is not None) and not self._copies.lasting(array):
                connection.own(payload, self._copies)
        waits = session is not None and (connection.left or session.received - session.told >= ACKNOWLEDGED)
        if waits and connection.connected():
            self._acknowledge(connection)

    def _flush(self, connection: PeerLink, *more: memoryview) -> None:
        """Write the queue, and `more` after it, as far as the socket accepts it."""
        out = connection.out
        out.extend(more)
        for part in more:
            connection.waiting += part.nbytes
        session = connection.session
        if session is not None and (connection.deaf or not connection.connected()):
            return
        try:
            if isinstance(connection.socket, SealedSocket):
                connection.socket.flush()
            while out:
                sent = connection.socket.sendmsg([out[0], out[1]] if len(out) > 1 else [out[0]])
                connection.waiting -= sent
                while out and sent >= out[0].nbytes:
                    part = out.popleft()
                    sent -= part.nbytes
                    if session is not None:
                        session.keep(part)
                if sent:
                    if session is not None:
                        session.keep(out[0][:sent])
                    out[0] = out[0][sent:]
        except BlockingIOError:
            pass
        except BaseException as error:
            if not _by_system(error):
                self._drop(connection)
                raise
            connection.deaf = True  # the peer has closed: messages that it sent before are still read
            connection.refused |= isinstance(error, ConnectionRefusedError)
            if session is None:
                out.clear()
                connection.waiting = 0
                self._note_end(connection)
        sealed = isinstance(connection.socket, SealedSocket)
        if (
            (out or sealed or connection.armed)
            and connection.connected()
            and connection.armed != connection.has_output()
        ):
            connection.armed = not connection.armed
            self._epoll.modify(connection.socket, select.EPOLLIN | (select.EPOLLOUT if connection.armed else 0))

    def _read(self, connection: PeerLink) -> None:
        """Read what has arrived, as far as it belongs to one message."""
        try:
            if not connection.staging and not self._prove(connection):
                return
            if connection.body is None:
                end = connection.end
                count = connection.socket.recv_into(connection.staging[end : end + connection.ahead])
                connection.end += count
                if count:
                    self._count(connection, count)
                    self._parse(connection)
                else:
                    self._break(connection, "the connection was closed")
            while connection.body is not None and connection.connected():
                count = connection.socket.recv_into(connection.body[connection.filled :])
                connection.filled += count
                self._count(connection, count)
                if not count:
                    self._break(connection, "the connection was closed")
                elif connection.filled == connection.body.nbytes:
                    body, connection.body = connection.body, None
                    self._deliver(connection, connection.header, body)
        except BlockingIOError:
            pass
        except MemoryError:
            self._refuse(connection, ProtocolError("a peer announced an array that exceeds the memory"))
        except LinkForged as error:
            self._forged(connection, str(error))
        except BaseException as error:
            if not _by_system(error):
                self._drop(connection)
                raise
            if connection.established:  # the peer has closed the connection
                self._break(connection, str(error))
            else:
                connection.refused |= isinstance(error, ConnectionRefusedError)
                why = f"the connection ended before the other end proved that it knows the secret: {error}"
                self._end_unproved(connection, why)

    def _forged(self, connection: PeerLink, why: str) -> None:
        """Bytes arrived that the peer cannot have sent: a session goes on over another connection."""
        if connection.session is None and connection.wanted not in self._peers:
            self._reject(connection, why)
            return
        self.traffic.corrupted += 1
        if connection.session is not None:
            self._break(connection, why)
        else:  # the next attempt to go on with the session may arrive unchanged
            self._drop(connection)

    def _count(self, connection: PeerLink, count: int) -> None:
        """Count bytes that have arrived in a session, and acknowledge them from time to time."""
        session = connection.session
        if session is not None:
            session.received += count
            if session.received - session.told >= ACKNOWLEDGED and not connection.writing:
                self._acknowledge(connection)

    def _prove(self, connection: PeerLink) -> bool:
        """Go on with the handshake; return whether the other end has proved that it belongs to this run."""
        link = connection.socket
        if isinstance(link, SealedSocket):
            if not link.shake():
                why = "the connection ended before the other end proved that it knows the secret"
                self._end_unproved(connection, why)
                return False
            connection.socket = link.plain or link
            self._flush(connection)  # what the handshake has held back
        connection.staging = memoryview(bytearray(STAGING))
        connection.ahead = _PREFIX.size  # nothing is read beyond the greeting, which precedes the session
        return True

    def _parse(self, connection: PeerLink) -> None:
        """Deliver the messages that have been read, and prepare a buffer for a payload that has begun."""
        staging, begin, end = connection.staging, 0, connection.end
        while end - begin >= _PREFIX.size and connection.open and connection.body is None:
            length, nbytes, arrived = _PREFIX.unpack_from(staging, begin)
            follows, length = length & _PAYLOAD, length & ~_PAYLOAD
            start = begin + _PREFIX.size
            session = connection.session
            if session is not None and arrived > session.acknowledged:
                try:
                    session.acknowledge(arrived)
                except ProtocolError as error:
                    self._refuse(connection, error)
                    return
            if not (length or follows) and (session is not None or nbytes == _GAVE_UP):
                begin = start
                self._note_departure(connection, nbytes)
                continue
            if not self._sizes_allowed(connection, length, nbytes):
                return
            if end - start < length:
                connection.ahead = STAGING if connection.greeting is not None else length - (end - start)
                break
            header, begin = bytes(staging[start : start + length]), start + length
            if not follows:
                connection.ahead = STAGING
                self._deliver(connection, header, None)
                continue
            connection.ahead = USUAL_HEADER if nbytes > STAGING else STAGING
            here = min(nbytes, end - begin)
            if here == nbytes < SMALLEST:
                self._deliver(connection, header, memoryview(bytes(staging[begin : begin + here])))
                begin += here
                continue
            body = self._room(connection, header, nbytes)
            body[:here], begin = staging[begin : begin + here], begin + here
            if here == nbytes:
                self._deliver(connection, header, body)
            else:
                connection.header, connection.body, connection.filled = header, body, here
        if begin < end:
            staging[: end - begin] = staging[begin:end]
        connection.end = end - begin

    def _note_departure(self, connection: PeerLink, which: int) -> None:
        """The peer leaves, or has given up the session that this node wants to continue on a new connection; a prefix
        with neither only acknowledges bytes.
        """
        if which == _LEAVES:
            connection.left = True
            if not connection.writing:
                self._acknowledge(connection)  # the peer waits for it
        elif which == _GAVE_UP and connection.session is None:
            if connection.wanted in self._peers:
                self._give_up(connection.wanted, f"{self._peers[connection.wanted].why}, and the other end gave it up")
            self._drop(connection)

    def _room(self, connection: PeerLink, header: bytes, nbytes: int) -> memoryview:
        """The buffer for a payload: the program's place if this is the wanted message, otherwise a reused buffer."""
        wanted, greeting = self._wanted, connection.greeting
        if (
            isinstance(connection.socket, socket.socket)  # what is encrypted is decrypted before its tag is verified
            and wanted is not None
            and wanted.place is not None
            and greeting is not None
            and greeting.source == wanted.source
            and nbytes == wanted.place.nbytes
            and not any(isinstance(one, Message) and one.source == wanted.source for one in self._inbox)
            and announces(header, wanted.tag, wanted.place)
        ):
            self._placing = connection
            return wanted.place.view(np.uint8).data
        return self._copies.room(nbytes).data

    def _sizes_allowed(self, connection: PeerLink, length: int, nbytes: int) -> bool:
        if connection.greeting is None:
            if length <= GREETING_BYTES and not nbytes:
                return True
            self._reject(
                connection,
                f"the first message has a header of {length} bytes and a payload of {nbytes} bytes, which is too long",
            )
            return False
        if length <= MAX_HEADER and nbytes <= self._me.model_bytes + MAX_CODING:
            return True
        who = node_name(connection.greeting.source)
        what = f"a header of {length} bytes and a payload of {nbytes} bytes"
        self._refuse(
            connection, ProtocolError(f"{who} announced {what}, but the model has only {self._me.model_bytes} bytes")
        )
        return False

    def _deliver(self, connection: PeerLink, header: bytes, body: memoryview | None) -> None:
        greeting = connection.greeting
        try:
            if greeting is None:
                connection.greeting = decode_greeting(header, self._me)
                self._admit(connection)
            elif self._peers.get(greeting.source) is not connection:
                self._reject(connection, f"{node_name(greeting.source)} sent a message before it was accepted")
            else:
                message = decode(header, body, greeting.source, self._me)
                if self._placing is connection and self._wanted is not None:
                    message.array, self._placed, self._placing = self._wanted.place, message, None
                self._unread += message.payload_bytes
                self._inbox.append(message)
        except ProtocolError as error:
            if greeting is None:
                self._reject(connection, str(error))
            else:
                self._refuse(connection, error)

    def _refuse(self, connection: PeerLink, error: ProtocolError) -> None:
        """Report a peer's message that breaks the protocol, and close the connection."""
        self._inbox.append(error)
        connection.why = str(error)
        self._drop(connection)


def _attend(bus: weakref.ref[StreamBus]) -> None:
    """Serve the sockets of a bus as long as the bus exists."""
    going = True
    while going:
        time.sleep(TICK)
        here = bus()
        going = here is not None and here.attend()
        del here


def _by_system(error: BaseException) -> bool:
    """Whether the system raised an error, rather than a signal handler, whose `TimeoutError` is an `OSError` too."""
    return isinstance(error, OSError) and error.errno is not None
