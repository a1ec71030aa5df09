"""Connections between the supervisor and the processes of its run.

Every process of a host connects to the Unix socket of the supervisor, or of its host's agent, which forwards the frames
to the supervisor of another host. The sockets are in a folder that only the run's user can enter. A message is a prefix
with two lengths, a header, and the bytes of an array if there is one.

A connection that closes shows that a process has ended. A process that was stopped is recognized by its state, which
the system knows; so a process that computes for a long time, even in code that holds the interpreter lock, is not
mistaken for a stopped one.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.errors import PeerLost, ProtocolError
from flockstep.links.addresses import listening
from flockstep.links.bus import LAUNCHER
from flockstep.links.wire import MAX_CODING, MAX_HEADER, SenderIdentity, decode, encode
from flockstep.messages import Address, Fields, Message, node_name

CONTROL_BYTES = 1 << 20
"""Largest size in bytes of a process's first message, which says who the process is."""
WELCOME_BYTES = 1 << 20
"""Largest size in bytes of the header of a supervisor's message, which may hold the addresses of all nodes, about 150
bytes each.
"""
PARTS = 64
"""Largest number of parts that one system call sends."""
LOOKS = 8
"""Number of times per heartbeat timeout that the state of the process at the other end is looked up."""
PAUSE = 0.05
"""Longest time in seconds that a process waits for room in its socket before it looks for the supervisor."""
_PREFIX = struct.Struct("<Iq")
_NO_PAYLOAD = -1
_CREDENTIALS = struct.Struct("3i")


Buffer = bytes | bytearray | memoryview


class Frames(Protocol):
    """A connection to one node that carries messages as frames: a header, and an array's bytes if there are any."""

    def send(self, frames: Sequence[Buffer]) -> None:
        """Queue a message without waiting. The frames must not change afterwards."""

    def receive(self, most: int, header: int = MAX_HEADER) -> Sequence[Buffer] | None:
        """Return the next message that has arrived; None if no message has arrived.

        Raises:
            ProtocolError: the message is not a message, its array has more than `most` bytes, or its header has more
                than `header` bytes.
        """

    def disconnected(self) -> bool:
        """Return whether the other end is gone."""

    def close(self) -> None:
        """Close the connection; queued messages are dropped. Closing the connection again has no effect."""


class _ProcessState:
    """The process at the other end of a connection, as the system shows it."""

    def __init__(self, sock: socket.socket, heartbeat: float):
        self._heartbeat = heartbeat
        self._stopped: float | None = None
        """Time since which the process has been seen stopped, in seconds of the monotonic clock."""
        self._next_look = 0.0
        pid = 0
        if hasattr(socket, "SO_PEERCRED"):  # elsewhere only a closed connection shows that the process is gone
            pid, _, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        self._file = Path(f"/proc/{pid}/stat") if pid else None  # 0: a process of another namespace of process ids

    def lost(self) -> bool:
        """Return whether the process has ended, or has been stopped for longer than the heartbeat timeout."""
        now = time.monotonic()
        if self._file is not None and now >= self._next_look:
            self._next_look = now + self._heartbeat / LOOKS
            try:
                state = self._file.read_text().rpartition(")")[2].split()[0]
            except (FileNotFoundError, ProcessLookupError):
                state = "X"
            except OSError:  # this process has too many open files
                return False
            if state in "ZX":  # a child that it forked may keep the connection open
                return True
            self._stopped = None if state not in "Tt" else now if self._stopped is None else self._stopped
        return self._stopped is not None and now - self._stopped > self._heartbeat


class LocalFrames(Frames):
    """One end of a connection between two processes of a host."""

    def __init__(self, sock: socket.socket, heartbeat: float):
        """`heartbeat`: seconds after which a stopped process counts as lost."""
        sock.setblocking(False)
        self._socket = sock
        self._peer = _ProcessState(sock, heartbeat)
        self._out: deque[memoryview] = deque()
        self.ended = False
        """Whether the connection is closed."""
        self._frames: list[memoryview] = []
        """The parts of the message that is arriving: prefix, header, payload."""
        self._part, self._filled = memoryview(bytearray(_PREFIX.size)), 0

    def fileno(self) -> int:
        """Return the file descriptor; it is readable when `receive` may have a message."""
        return self._socket.fileno()

    @property
    def blocked(self) -> bool:
        """Whether queued bytes wait until the socket accepts them."""
        return bool(self._out) and not self.ended

    def send(self, frames: Sequence[Buffer]) -> None:
        payload = memoryview(frames[1]).cast("B") if len(frames) > 1 and len(frames[1]) else memoryview(b"")
        nbytes = payload.nbytes if len(frames) > 1 else _NO_PAYLOAD
        self._out.append(memoryview(_PREFIX.pack(len(frames[0]), nbytes) + bytes(frames[0])))
        if payload:
            self._out.append(payload)
        self.flush()

    def flush(self) -> None:
        """Send as much of the queue as the socket accepts."""
        while self.blocked:
            try:
                sent = self._socket.sendmsg([self._out[at] for at in range(min(len(self._out), PARTS))])
            except BlockingIOError:
                return
            except OSError:  # the other end is gone; what it sent before can still be received
                self._out.clear()
                return
            while sent:
                part = self._out.popleft()
                if sent < part.nbytes:
                    self._out.appendleft(part[sent:])
                sent -= min(sent, part.nbytes)

    def receive(self, most: int, header: int = MAX_HEADER) -> Sequence[memoryview] | None:
        while not self.ended:
            if self._filled < self._part.nbytes:
                try:
                    count = self._socket.recv_into(self._part[self._filled :])
                except BlockingIOError:
                    return None
                except OSError:
                    count = 0
                self._filled += count
                self.ended = not count
                continue
            self._frames.append(self._part)
            length, nbytes = _PREFIX.unpack(self._frames[0])
            if not (0 < length <= header and _NO_PAYLOAD <= nbytes <= most):
                self.ended = True
                raise ProtocolError(
                    f"a message announced a header of {length} bytes and an array of {nbytes} bytes, but at most "
                    f"{header} and {most} are allowed"
                )
            if len(self._frames) == 1:
                self._expect(length)
            elif len(self._frames) == 2 and nbytes >= 0:
                self._expect(nbytes)
            else:
                found, self._frames = self._frames[1:], []
                self._expect(_PREFIX.size)
                return found
        return None

    def _expect(self, size: int) -> None:
        self._part, self._filled = np.empty(size, np.uint8).data, 0  # takes memory only as the bytes arrive

    def disconnected(self) -> bool:
        return self.ended or self._peer.lost()

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            self.ended = True
            with contextlib.suppress(OSError):  # a process that this one has forked may keep the socket open
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()


class Control:
    """The socket of a supervisor, or of a host's agent, to which every process of a run on this host connects."""

    def __init__(self, address: str, heartbeat: float, sock: socket.socket | None = None):
        """Listen at `address`, ipc://PATH. `heartbeat`: seconds after which a stopped process counts as lost; `sock`:
        a socket that listens there already.

        Raises:
            ConfigurationError: it is not possible to listen at the address.
        """
        self._heartbeat = heartbeat
        self._socket, self.address = listening(address, heartbeat) if sock is None else (sock, address)
        self._socket.setblocking(False)
        self._unknown: list[LocalFrames] = []
        """Connections of processes that have not said who they are."""

    def heard(self) -> Iterator[tuple[bytes, LocalFrames]]:
        """Return what processes that have connected say first, with the connection of each."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._unknown.append(LocalFrames(self._socket.accept()[0], self._heartbeat))
        for connection in list(self._unknown):
            gone = connection.disconnected()  # before it is heard: what it said before its end counts
            try:
                frames = connection.receive(0, CONTROL_BYTES)
            except ProtocolError:  # a stranger
                frames, gone = None, True
            if frames is not None or gone:
                self._unknown.remove(connection)
            if frames is not None:
                yield bytes(frames[0]), connection
            elif gone:
                connection.close()

    def wait(self, connections: Iterable[Frames], seconds: float, also: Iterable[int] = ()) -> bool:
        """Wait up to `seconds` until a process connects, a message arrives or a descriptor of `also` becomes readable;
        return whether one has. `flush` is due afterwards.
        """
        poll, own = select.poll(), set[int]()
        poll.register(self._socket, select.POLLIN)
        for one in (*self._unknown, *connections):
            if isinstance(one, LocalFrames) and not one.ended:
                own.add(one.fileno())
                poll.register(one, select.POLLIN | (select.POLLOUT if one.blocked else 0))
        for descriptor in also:
            poll.register(descriptor, select.POLLIN)
        ready = poll.poll(seconds * 1000)
        return any(what & ~select.POLLOUT or descriptor not in own for descriptor, what in ready)

    @staticmethod
    def flush(connections: Iterable[Frames]) -> None:
        """Send as much of what is queued as the connections accept."""
        for one in connections:
            if isinstance(one, LocalFrames):
                one.flush()

    def close(self) -> None:
        """Close the socket, and the connections of processes that have not said who they are."""
        for connection in self._unknown:
            connection.close()
        self._socket.close()


class Line:
    """A node's end of its link to the supervisor."""

    def __init__(self, me: SenderIdentity, control: str, heartbeat: float):
        """Connect to the supervisor, or to the agent of this host, at the address `control`.

        `heartbeat`: seconds after which a stopped supervisor counts as lost.

        Raises:
            PeerLost: nothing listens at the address.
        """
        self._me = me
        self._connection = LocalFrames(connected(control), heartbeat)
        self._descriptors = (self._connection.fileno(),)
        self._sent_count = 0

    @property
    def descriptors(self) -> tuple[int, ...]:
        """File descriptor that is readable when `receive` may have a message; none if the connection is closed."""
        return () if self._connection.ended else self._descriptors

    def introduce(self, data: bytes) -> None:
        """Send the first message, which says who this process is.

        Raises:
            PeerLost: the supervisor is gone.
        """
        self._send([data])

    def send(self, tag: str, note: Fields | None = None, array: FlatArray | None = None) -> None:
        """Send a message to the supervisor.

        Raises:
            PeerLost: the supervisor is gone, or has been stopped.
        """
        self._sent_count += 1
        message = Message(self._me.address, tag, array, note or {}, number=self._sent_count)
        self._send(framed(message, self._me))

    def _send(self, frames: Sequence[Buffer]) -> None:
        """Send frames, and wait until the socket has accepted them: the caller may change the array afterwards."""
        self._connection.send(frames)
        while self._connection.blocked and not self._connection.disconnected():
            _poll(self._connection.fileno(), select.POLLOUT, PAUSE)
            self._connection.flush()
        if self._connection.disconnected():
            self._connection.close()  # a supervisor that wakes up now learns the reason from the exit code
            raise PeerLost("this process has no connection to the supervisor of the run")

    def receive(self) -> Message | None:
        """Return the next message that has arrived from the supervisor; None if no message has arrived.

        Raises:
            ProtocolError: the message breaks the protocol.
        """
        frames = self._connection.receive(self._me.model_bytes + MAX_CODING, WELCOME_BYTES)
        return None if frames is None else unframed(frames, LAUNCHER, self._me)

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` for a message from the supervisor."""
        _poll(-1 if self._connection.ended else self._connection.fileno(), select.POLLIN, seconds)

    def close(self) -> None:
        """Close the link. Closing the link again has no effect."""
        self._connection.close()


def _poll(descriptor: int, what: int, seconds: float) -> None:
    """Wait up to `seconds` until a descriptor is ready, or until then if it is -1; its number may be any."""
    poll = select.poll()
    if descriptor >= 0:
        poll.register(descriptor, what)
    poll.poll(seconds * 1000)


def say_to_control(control: str, data: bytes) -> None:
    """Send one message to the control socket at the address `control`, without waiting for an answer.

    Raises:
        PeerLost: nothing listens at the address.
    """
    with connected(control) as sock:
        sock.sendall(_PREFIX.pack(len(data), _NO_PAYLOAD) + data)


def connected(address: str) -> socket.socket:
    """Return a connection to the control socket at the address ipc://PATH.

    Raises:
        PeerLost: nothing listens at the address.
    """
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(address.partition("://")[2])
    except OSError as error:
        sock.close()
        raise PeerLost(f"the supervisor of the run does not listen any more: {error.strerror}") from None
    return sock


def framed(message: Message, me: SenderIdentity) -> list[Buffer]:
    """Return the frames of a message: the header, and the array's bytes if there is an array."""
    frames: list[Buffer] = [encode(message, me)]
    if message.array is not None:
        frames.append(message.array.data.cast("B") if message.array.size else b"")
    return frames


def unframed(frames: Sequence[Buffer], source: Address, me: SenderIdentity) -> Message:
    """Return the message that frames from `source` carry.

    Raises:
        ProtocolError: the message breaks the protocol.
    """
    if len(frames) > 2:
        raise ProtocolError(
            f"{node_name(source)} sent a message with {len(frames) - 1} payloads; at most one is allowed"
        )
    payload = memoryview(frames[1]) if len(frames) > 1 else None
    return decode(bytes(frames[0]), payload, source, me, WELCOME_BYTES)
