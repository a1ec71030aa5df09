"""A bus over stream sockets: Unix sockets on one host, TCP between hosts; large arrays in memory that nodes share.

Each pair of nodes has one connection, on which every message is a prefix (length of the header, length of the
payload), the header and the payload. The first message each way is a greeting; until it has arrived and is right,
nothing else is read. A payload is written to the socket from where it lies as long as the socket takes it, and copied
only when it has to wait; it is received where the program wants to have it, or into memory that is used again.

While the program computes, a thread receives and sends what the sockets have room for. A signal's handler may raise
anywhere: where it does so while bytes are moved, the connection is closed, since how far they have got is not known.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Collection, Mapping
from threading import Lock, Thread

import numpy as np

from flockstep.errors import CompositionError, PeerLost, ProtocolError
from flockstep.messages import Address, Array, Message, Wanted, node_name
from flockstep.transports.bus import Backlog, Bus, Traffic, cannot_listen
from flockstep.transports.copies import Copies
from flockstep.transports.shared_heap import NODES, SMALLEST, Borrowed, SharedHeap, heap_room_for
from flockstep.transports.wire import (
    GREETING,
    MAX_CODING,
    MAX_HEADER,
    Identity,
    announces,
    decode,
    decode_greeting,
    encode,
)

QUEUED = 10_000
"""Messages that may wait for one peer before the sender has to wait for it."""
AHEAD = 1 << 26
"""Bytes that may wait for one peer before the sender has to wait for it."""
UNREAD = 1 << 28
"""Bytes of messages that are read ahead of the program."""
LOCAL_BUFFER = 1 << 20
"""Bytes of the system's buffers within a host: with more, what is on its way no longer fits the processor's caches.
Between hosts the system chooses, as the delay of the link demands."""
STAGING = 1 << 17
"""Bytes that are read at a time where no large payload is due; more than the largest header."""
USUAL_HEADER = 256
"""Bytes that are read first where a large payload is due."""
STRANGERS = 128
"""Connections that may stand without a greeting; with one more, the first of them is closed."""
PATIENCE = 20.0
"""Seconds in which a connection must stand: the first packets over a new network link may be lost, and are sent again
late."""
JOINED = 1 << 13
"""Bytes below which a payload is copied behind its header: that costs less than keeping track of two parts."""
BRIEF = 0.001
"""Seconds without progress after which what is left of a message is copied and waits."""
FAST = 1e9
"""Bytes per second: a connection that takes fewer is not waited for."""
GREETING_BYTES = 1 << 10
"""The largest header of a connection that has not greeted yet."""
TICK = 0.01
"""Seconds between two looks at the sockets while the program computes."""
UNANSWERED = 7
"""Packets in a row that nobody acknowledges, after which a connection by TCP is broken: 25 seconds or more, since the
system doubles the time between them. TCP_USER_TIMEOUT would also end a connection to a peer that is slow to read."""
_PREFIX = struct.Struct("<IQ")
_PAYLOAD = 1 << 31
"""In the length of the header: a payload follows, which may be empty."""


class _Connection:
    """One connection, and how far what comes and goes on it has got."""

    def __init__(self, sock: socket.socket, wanted: Address | None = None):
        self.socket = sock
        self.wanted = wanted
        """Who this node has connected to; None: the other end connected."""
        self.greeting: Message | None = None
        self.open = True
        self.deaf = False
        """Nothing more can be written."""
        self.armed = False
        """Whether the end of a jam is waited for."""
        self.out: deque[memoryview] = deque()
        self.waiting = 0
        """Bytes of `out`."""
        self.staging = memoryview(bytearray(STAGING))
        self.end = 0
        """Bytes of `staging` that have been read."""
        self.ahead = STAGING
        """Bytes to read at a time: few where a large payload is likely to follow, which has a place of its own."""
        self.header = b""
        self.body: memoryview | None = None
        """The payload that is arriving, of which `filled` bytes are here."""
        self.filled = 0

    def usable(self) -> bool:
        """Whether more can be written."""
        return self.open and not self.deaf


class StreamBus(Bus):
    """A node's connections to its peers, one for each."""

    def __init__(self, me: Identity, address: str, lends: bool = False):
        """Listens at `address`: ipc://PATH, or tcp://HOST:* for any free port. `lends`: peers may read its memory.

        Raises:
            ConfigurationError: the address cannot be listened at.
        """
        self.traffic = Traffic()
        self.rejected = 0
        """Connections that were refused."""
        self._me = me
        self._copies = Copies()
        self._heap = SharedHeap(heap_room_for(me.model_bytes)) if lends else None
        self._listener, self.address = _listening(address)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._also: Collection[int] = ()
        self._lent: set[Address] = set()
        self._connections: dict[int, _Connection] = {}
        self._peers: dict[Address, _Connection] = {}
        self._ended: dict[Address, float] = {}
        """Peer → when its connection ended."""
        self._expected: set[Address] | None = None
        self._inbox: deque[Message | ProtocolError] = deque()
        self._unread = 0
        self._lock = Lock()
        """Held by whoever moves bytes: the program, or the thread that attends to the sockets."""
        self._asked = False
        """Whether the program wants in."""
        self._closed = self._woken = False
        self._wanted: Wanted | None = None
        """The message that the program waits for, if it has a place for its array."""
        self._placing: _Connection | None = None
        """The connection on which it arrives there."""
        self._placed: Message | None = None
        """It, once it is in the inbox."""
        self._looked = 0.0
        """When it was last looked for packets that nobody acknowledges."""
        if self._heap is not None:
            self.address += f" {self._heap.told}"

    def connect(self, peers: Mapping[Address, str]) -> None:
        """Connect to the peers before this node in the order of addresses; the others connect here."""
        if self._heap is not None and len(peers) < NODES:
            for peer, told in peers.items():
                with contextlib.suppress(CompositionError):  # on another host: what is sent there goes by socket
                    self._me.borrowed[peer] = Borrowed(told.partition(" ")[2], self._me.address)
        with self._lock:
            self._expected = set(peers)
            for connection in list(self._connections.values()):
                self._admit(connection)
            for peer, told in peers.items():
                if peer < self._me.address and (sock := _connected(told.partition(" ")[0])) is not None:
                    self._greet(self._add(sock, peer), peer)
        Thread(target=_attend, args=(weakref.ref(self),), name="flockstep-bus", daemon=True).start()

    def disconnect(self, peer: Address) -> None:
        """Give up a peer that was lost."""
        self._copies.lost.add(peer)
        if peer in self._peers:
            with self._lock:
                self._drop(self._peers[peer])

    def reachable(self, peer: Address) -> bool:
        """Whether the connection to the peer stands."""
        return peer in self._peers and self._peers[peer].usable()

    def waiting(self, peer: Address) -> int:
        """Bytes of messages to the peer that wait for room."""
        connection = self._peers.get(peer)
        return connection.waiting if connection is not None and connection.usable() else 0

    def broken(self, seconds: float) -> set[Address]:
        """The peers whose connection ended at least so long ago, for whatever reason."""
        latest = time.monotonic() - seconds
        return {peer for peer, at in self._ended.items() if at <= latest}

    def lend(self, array: Array) -> Array:
        """A read-only copy in shared memory where there is room, or else in memory that is used again."""
        return self._copies.frozen(array)

    def send(self, to: Address, message: Message) -> None:
        """Send a message to a peer; an array that is not lent may change afterwards."""
        connection = self._peers.get(to)
        if connection is None or not connection.usable():
            raise self._unreachable(to)
        if len(connection.out) >= 2 * QUEUED or connection.waiting >= AHEAD:
            raise Backlog(f"{node_name(to)} takes no messages: {connection.waiting} bytes wait for it")
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
        self.traffic.sent(message, len(header))

    def poll(self, seconds: float | None, also: Collection[int] = (), wanted: Wanted | None = None) -> Message | None:
        """The next message from a peer."""
        self._asked = True
        with self._lock:
            self._asked = False
            if also != self._also:
                self._watch(also)
            if not self._inbox:
                self._wait(seconds, wanted)
                if not self._inbox:
                    return None
            message = self._inbox.popleft()
            if not isinstance(message, Message):
                raise message
            self._unread -= message.payload_bytes
        self.traffic.received(message)
        return message

    def _wait(self, seconds: float | None, wanted: Wanted | None) -> None:
        """Wait for the next message, and receive it where it is wanted: nothing is written there afterwards."""
        now = time.monotonic()
        until = None if seconds is None else now + seconds
        self._end_unanswered(now)
        self._woken = False
        place = None if wanted is None else wanted.place
        if isinstance(place, np.ndarray) and place.ndim == 1 and place.flags.c_contiguous:
            self._wanted = wanted
        try:
            self._move(seconds)
            while not (self._inbox or self._woken or (until is not None and time.monotonic() >= until)):
                self._move(None if until is None else max(0.0, until - time.monotonic()))
        finally:
            if self._wanted is not None:
                self._settle()

    def _settle(self) -> None:
        """Take what arrives, and does not go to the program now, away from where it is wanted."""
        placed, placing, self._wanted, self._placed, self._placing = self._placed, self._placing, None, None, None
        if placed is not None and self._inbox[0] is not placed:
            placed.array = self._copies.frozen(placed.payload)
        if placing is not None and placing.body is not None:
            body = self._copies.room(placing.body.nbytes).data
            body[: placing.filled] = placing.body[: placing.filled]
            placing.body = body

    def close(self, linger: float) -> None:
        """Close all connections."""
        until = time.monotonic() + linger
        with self._lock:
            self._closed = True
            while any(one.out for one in self._connections.values()) and time.monotonic() < until:
                self._move(BRIEF)
            for connection in list(self._connections.values()):
                with contextlib.suppress(OSError):
                    connection.socket.shutdown(socket.SHUT_WR)
                self._drop(connection)
            self._listener.close()
            self._epoll.close()

    def attend(self) -> bool:
        """Receive and send what the sockets have room for, while the program is elsewhere; whether to come again."""
        if not self._asked and self._lock.acquire(blocking=False):
            try:
                self._end_unanswered(time.monotonic())
                while self._may_attend() and self._move(0):
                    pass
            finally:
                self._lock.release()
        self._asked = False
        return not self._closed

    def _may_attend(self) -> bool:
        return not (self._closed or self._asked or self._unread > UNREAD)

    def _end_unanswered(self, now: float) -> None:
        """Close connections, once a second, whose packets are lost: keepalive sends none while others are under way."""
        if now < self._looked + 1:
            return
        self._looked = now
        for connection in list(self._connections.values()):
            if connection.socket.family == socket.AF_INET:
                *_, resent, probes = connection.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 4)
                if max(resent, probes) >= UNANSWERED:
                    self._drop(connection)

    def _unreachable(self, peer: Address) -> PeerLost:
        return PeerLost(f"{node_name(peer)} is not reachable from {node_name(self._me.address)}")

    def _move(self, seconds: float | None) -> int:
        """Let all sockets go on that can, within that time; how many did."""
        moved = 0
        for descriptor, what in self._epoll.poll(seconds):
            connection = self._connections.get(descriptor)
            if connection is not None:
                moved += 1
                if what & select.EPOLLOUT:
                    self._flush(connection)
                if what & ~select.EPOLLOUT and connection.open:
                    self._read(connection)
            elif descriptor == self._listener.fileno():
                self._accept()
            else:
                self._woken = True
        return moved

    def _watch(self, also: Collection[int]) -> None:
        for descriptor in self._also:
            with contextlib.suppress(OSError):  # it was closed meanwhile
                self._epoll.unregister(descriptor)
        for descriptor in also:
            self._epoll.register(descriptor, select.EPOLLIN)
        self._also = also

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has gone again
            self._add(self._listener.accept()[0])
            strangers = [one for one in self._connections.values() if one.greeting is None and one.wanted is None]
            if len(strangers) > STRANGERS:  # a peer greets at once
                self._reject(strangers[0])

    def _add(self, sock: socket.socket, wanted: Address | None = None) -> _Connection:
        sock.setblocking(False)
        if sock.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, seconds in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
                sock.setsockopt(socket.IPPROTO_TCP, option, seconds)
        if sock.family != socket.AF_INET or sock.getpeername()[0].startswith("127."):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                sock.setsockopt(socket.SOL_SOCKET, option, LOCAL_BUFFER)
        connection = self._connections[sock.fileno()] = _Connection(sock, wanted)
        self._epoll.register(sock, select.EPOLLIN)
        return connection

    def _greet(self, connection: _Connection, peer: Address) -> None:
        """Say who this node is, and whether it can read the peer's memory."""
        note = {"memory": int(peer in self._me.borrowed)}
        self._write(connection, encode(Message(self._me.address, GREETING, note=note), self._me), None)

    def _admit(self, connection: _Connection) -> None:
        """Take up a connection that has greeted, once it is known who may."""
        if connection.greeting is None or self._expected is None or not connection.open:
            return
        peer, wanted = connection.greeting.source, connection.wanted
        due = peer in self._expected and peer > self._me.address if wanted is None else peer == wanted
        if not due or peer in self._peers:
            self._reject(connection)
            return
        self._peers[peer] = connection
        if self._heap is not None and connection.greeting.note.get("memory"):
            self._lent.add(peer)
            self._copies.heap = self._heap
        if wanted is None:
            self._greet(connection, peer)

    def _reject(self, connection: _Connection) -> None:
        self.rejected += 1
        self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        if connection.open:
            connection.open = False
            connection.out.clear()
            connection.body = None
            del self._connections[connection.socket.fileno()]
            self._epoll.unregister(connection.socket)
            connection.socket.close()
            self._woken = True
            self._note_end(connection)

    def _note_end(self, connection: _Connection) -> None:
        peer = None if connection.greeting is None else connection.greeting.source
        if peer is not None and self._peers.get(peer) is connection:
            self._ended.setdefault(peer, time.monotonic())

    def _write(self, connection: _Connection, header: bytes, array: Array | None) -> None:
        """Write a message; what the socket does not take soon is copied, unless nobody can change it, and waits."""
        if array is None or array.nbytes < JOINED:
            follows, data = (0, b"") if array is None else (_PAYLOAD, array.tobytes())
            self._flush(connection, memoryview(_PREFIX.pack(len(header) | follows, len(data)) + header + data))
            return
        payload = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        self._flush(connection, memoryview(_PREFIX.pack(len(header) | _PAYLOAD, payload.nbytes) + header), payload)
        if not connection.out:
            return
        try:
            if payload.nbytes >= SMALLEST:
                until = time.monotonic() + BRIEF + payload.nbytes / FAST
                while connection.out and self._move(BRIEF) and time.monotonic() < until:
                    pass
        finally:
            if connection.out and not self._copies.lasting(array):
                left = connection.out.pop()
                kept = self._copies.room(left.nbytes)
                kept[:] = left
                connection.out.append(kept.data)

    def _flush(self, connection: _Connection, *more: memoryview) -> None:
        """Write what waits, and `more` after it, as far as the socket takes it."""
        out = connection.out
        out.extend(more)
        for part in more:
            connection.waiting += part.nbytes
        try:
            while out:
                sent = connection.socket.sendmsg([out[0], out[1]] if len(out) > 1 else [out[0]])
                connection.waiting -= sent
                while out and sent >= out[0].nbytes:
                    sent -= out.popleft().nbytes
                if sent:
                    out[0] = out[0][sent:]
        except BlockingIOError:
            pass
        except OSError:  # the peer has gone: what it sent before is still read
            out.clear()
            connection.waiting = 0
            connection.deaf = True
            self._note_end(connection)
        except BaseException:
            self._drop(connection)
            raise
        if connection.armed != bool(out) and connection.open:
            connection.armed = bool(out)
            self._epoll.modify(connection.socket, select.EPOLLIN | (select.EPOLLOUT if out else 0))

    def _read(self, connection: _Connection) -> None:
        """Read what is here, as far as it belongs together."""
        try:
            if connection.body is None:
                end = connection.end
                count = connection.socket.recv_into(connection.staging[end : end + connection.ahead])
                connection.end += count
                if count:
                    self._parse(connection)
                else:
                    self._drop(connection)
            while connection.body is not None and connection.open:
                count = connection.socket.recv_into(connection.body[connection.filled :])
                connection.filled += count
                if not count:
                    self._drop(connection)
                elif connection.filled == connection.body.nbytes:
                    body, connection.body = connection.body, None
                    self._deliver(connection, connection.header, body)
        except BlockingIOError:
            pass
        except OSError:  # the peer has gone
            self._drop(connection)
        except BaseException:
            self._drop(connection)
            raise

    def _parse(self, connection: _Connection) -> None:
        """Deliver the messages that have been read, and make room for the payload that has begun."""
        staging, begin, end = connection.staging, 0, connection.end
        while end - begin >= _PREFIX.size and connection.open and connection.body is None:
            length, nbytes = _PREFIX.unpack_from(staging, begin)
            follows, length = length & _PAYLOAD, length & ~_PAYLOAD
            if not self._sizes_allowed(connection, length, nbytes):
                return
            start = begin + _PREFIX.size
            if end - start < length:
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

    def _room(self, connection: _Connection, header: bytes, nbytes: int) -> memoryview:
        """Where to receive a payload: where the program wants it, if it is what the program waits for."""
        wanted, greeting = self._wanted, connection.greeting
        if (
            wanted is not None
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

    def _sizes_allowed(self, connection: _Connection, length: int, nbytes: int) -> bool:
        if connection.greeting is None:
            if length <= GREETING_BYTES and not nbytes:
                return True
            self._reject(connection)
            return False
        if length <= MAX_HEADER and nbytes <= self._me.model_bytes + MAX_CODING:
            return True
        who = node_name(connection.greeting.source)
        what = f"a header of {length} bytes and a payload of {nbytes}"
        self._refuse(connection, ProtocolError(f"{who} announced {what}; the model has {self._me.model_bytes}"))
        return False

    def _deliver(self, connection: _Connection, header: bytes, body: memoryview | None) -> None:
        greeting = connection.greeting
        try:
            if greeting is None:
                connection.greeting = decode_greeting(header, self._me)
                self._admit(connection)
            elif self._peers.get(greeting.source) is not connection:
                self._reject(connection)  # it speaks before it was let in
            else:
                message = decode(header, body, greeting.source, self._me)
                if self._placing is connection and self._wanted is not None:
                    message.array, self._placed, self._placing = self._wanted.place, message, None
                self._unread += message.payload_bytes
                self._inbox.append(message)
        except ProtocolError as error:
            if greeting is None:
                self._reject(connection)
            else:
                self._refuse(connection, error)

    def _refuse(self, connection: _Connection, error: ProtocolError) -> None:
        """What a peer of this run sent is not as agreed."""
        self._inbox.append(error)
        self._drop(connection)


def _attend(bus: weakref.ref[StreamBus]) -> None:
    """Attend to a bus as long as there is one."""
    going = True
    while going:
        time.sleep(TICK)
        here = bus()
        going = here is not None and here.attend()
        del here


def _listening(address: str) -> tuple[socket.socket, str]:
    """A socket that listens at ipc://PATH or tcp://HOST:PORT, where * is any free port; its address."""
    kind, _, place = address.partition("://")
    sock = socket.socket(socket.AF_UNIX if kind == "ipc" else socket.AF_INET)
    try:
        if kind == "ipc":
            sock.bind(place)
        else:
            host, _, port = place.rpartition(":")
            sock.bind((host, 0 if port == "*" else int(port)))
            address = "tcp://{}:{}".format(*sock.getsockname())
        sock.listen(NODES)
    except OSError as error:
        sock.close()
        raise cannot_listen(address, error.strerror or str(error)) from None
    sock.setblocking(False)
    return sock, address


def _connected(address: str) -> socket.socket | None:
    """A connection to that address; None if nobody listens there: who it was is for the supervisor to say."""
    kind, _, place = address.partition("://")
    sock = socket.socket(socket.AF_UNIX if kind == "ipc" else socket.AF_INET)
    sock.settimeout(PATIENCE)
    host, _, port = place.rpartition(":")
    try:
        sock.connect(place if kind == "ipc" else (host, int(port)))
    except OSError:
        sock.close()
        return None
    return sock
