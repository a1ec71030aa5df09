"""Connections between the supervisor and the processes of its run: one control socket for all, and one link to each.

The connections are ZeroMQ sockets. A ZeroMQ thread answers heartbeats, so a process that computes for a long time, even
in code that holds the interpreter lock, is not mistaken for a stopped process, and a stopped process is detected. The
size of messages is limited.

The ZeroMQ sockets are Unix sockets in a folder that only the run's user can enter, because ZeroMQ reads messages from
any process that can connect. A node of another host is connected to the agent of its host, which forwards the frames.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import zmq

from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError, PeerLost, ProtocolError
from flockstep.messages import Address, AnyNote, Fields, Message, node_name
from flockstep.transports.bus import LAUNCHER, Backlog, cannot_listen
from flockstep.transports.wire import MAX_CODING, MAX_HEADER, SenderIdentity, decode, encode

CONTROL_BYTES = 1 << 20
"""Largest size in bytes of a message that the control socket accepts."""
WELCOME_BYTES = 1 << 20
"""Largest size in bytes of the header of a supervisor's message. The header may hold the addresses of all nodes, about
150 bytes each.
"""
ZERO_COPY = 1 << 18
"""Smallest size in bytes of an array that is sent without a copy. Below this size a copy costs less than tracking the
array.
"""
_READABLE = int(zmq.POLLIN)
QUEUED = 10_000
"""Largest number of queued messages; a sender waits when its queue is full."""
CONTROL_LINGER_MS = 20_000
"""Maximum time in milliseconds for the delivery of a message to the control socket. It is long, because the first
packets over a new network link may be lost and sent again only after some time.
"""


Buffer = bytes | bytearray | memoryview


class Frames(Protocol):
    """A connection to one node that carries messages as frames: a header, and an array's bytes if there are any."""

    def send(self, frames: Sequence[Buffer], copy: bool) -> bool:
        """Queue a message without waiting; return False if the queue is full. Unless `copy` is set, the last frame must
        not change afterwards.
        """

    def receive(self) -> Sequence[Buffer] | None:
        """Return the next message that has arrived; None if no message has arrived."""

    def disconnected(self) -> bool:
        """Return whether the connection has broken since the last call."""

    def close(self) -> None:
        """Close the connection; queued messages are dropped."""


class Control:
    """The socket to which every process of a run on this host can send messages; it also opens the connections to these
    processes.
    """

    def __init__(self, address: str, heartbeat: float):
        """Listen at `address`. `heartbeat`: seconds without a heartbeat after which a node counts as lost.

        Raises:
            ConfigurationError: it is not possible to listen at the address.
        """
        self._heartbeat = heartbeat
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        harden(self.socket, CONTROL_BYTES, heartbeat)
        self.address = bind(self.socket, address)

    def heard(self) -> Iterator[bytes]:
        """Return the messages that have arrived on the control socket since the last call."""
        while self.socket.poll(0):
            yield self.socket.recv_multipart()[-1]

    def frames(self, endpoint: str, max_bytes: int) -> LocalFrames:
        """Connect to the node that listens at `endpoint`; its largest array has `max_bytes` bytes."""
        return LocalFrames(self._context, endpoint, max_bytes, self._heartbeat)

    def wait(
        self, connections: Iterable[Frames | Control], seconds: float, also: Mapping[int, bool] | None = None
    ) -> bool:
        """Wait up to `seconds` for a message on the control socket or on a connection; return whether one has arrived.

        `also` holds further file descriptors to wait for: file descriptor → whether to wait also until the descriptor
        accepts output.
        """
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        for one in connections:
            if isinstance(one, LocalFrames | Control):
                poller.register(one.socket, zmq.POLLIN)
        for descriptor, writes in (also or {}).items():
            poller.register(descriptor, zmq.POLLIN | (zmq.POLLOUT if writes else 0))
        return bool(poller.poll(int(seconds * 1000)))

    def close(self) -> None:
        """Close the control socket; all connections must have been closed."""
        self.socket.close(linger=0)
        self._context.term()


class LocalFrames(Frames):
    """A connection to a node of this host; detects that the node no longer answers heartbeats."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, max_bytes: int, heartbeat: float):
        self.socket = context.socket(zmq.DEALER)
        harden(self.socket, max_bytes, heartbeat)
        self.socket.setsockopt(zmq.ROUTING_ID, routing_id(LAUNCHER))
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.socket.connect(endpoint)

    def send(self, frames: Sequence[Buffer], copy: bool) -> bool:
        """Queue a message without waiting; return False if the node is gone or its queue is full. The exit of the
        node's process is detected elsewhere.
        """
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=copy)
        except zmq.Again:
            return False
        return True

    def receive(self) -> Sequence[Buffer] | None:
        """Return the next message that has arrived; None if no message has arrived."""
        try:
            return [frame.buffer for frame in self.socket.recv_multipart(zmq.NOBLOCK, copy=False)]
        except zmq.Again:
            return None

    def disconnected(self) -> bool:
        """Return whether the connection has broken since the last call."""
        broke = False
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            broke = True
        return broke

    def close(self) -> None:
        """Close the connection; queued messages are dropped. Closing the connection again has no effect."""
        if not self.socket.closed:
            self.socket.disable_monitor()
            self._monitor.close()
            self.socket.close(0)


class SupervisorLink:
    """The supervisor's end of a link to one node."""

    def __init__(self, frames: Frames, address: Address, me: SenderIdentity):
        """`me` identifies the supervisor."""
        self.frames = frames
        self._address = address
        self._me = me
        self._sent_count = 0

    def send(self, tag: str, note: AnyNote | None = None, array: FlatArray | None = None) -> None:
        """Queue a message without waiting.

        The array must not change afterwards, because all links send it without a copy.
        """
        message = Message(LAUNCHER, tag, array, note or {}, number=self._sent_count + 1)
        frames: list[Buffer] = [encode(message, self._me)]
        if array is not None:
            frames.append(array.data.cast("B"))
        self._sent_count += self.frames.send(frames, copy=array is None or array.nbytes < ZERO_COPY)

    def receive(self) -> Message | None:
        """Return the next message that has arrived from the node; None if no message has arrived.

        Raises:
            ProtocolError: the message breaks the protocol.
        """
        frames = self.frames.receive()
        if frames is None:
            return None
        if len(frames) > 2:
            raise ProtocolError(
                f"{node_name(self._address)} sent a message with {len(frames) - 1} payloads; at most one is allowed"
            )
        return decode(bytes(frames[0]), memoryview(frames[1]) if len(frames) > 1 else None, self._address, self._me)

    def disconnected(self) -> bool:
        """Return whether the connection has broken since the last call."""
        return self.frames.disconnected()

    def close(self) -> None:
        """Close the link; queued messages are dropped. Closing the link again has no effect."""
        self.frames.close()


class Line:
    """A node's end of its link to the supervisor. It listens at `address`, to which the supervisor connects."""

    def __init__(self, me: SenderIdentity, address: str, heartbeat: float):
        """Listen for the supervisor.

        `heartbeat`: seconds without a heartbeat after which the supervisor counts as lost.

        Raises:
            ConfigurationError: it is not possible to listen at the address.
        """
        self.rejected = 0
        """Number of unread messages from senders other than the supervisor."""
        self._me = me
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        harden(self._socket, me.model_bytes, heartbeat)
        self._socket.setsockopt(zmq.ROUTING_ID, routing_id(me.address))
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._sent_count = 0
        self._socket.setsockopt(zmq.MAXMSGSIZE, max(me.model_bytes + MAX_CODING, WELCOME_BYTES))
        try:
            self.address = bind(self._socket, address)
        except ConfigurationError:
            self.close(0)
            raise
        self.descriptor: int = self._socket.getsockopt(zmq.FD)  # type: ignore[assignment]
        """File descriptor that is readable when `receive` may have a message."""

    def send(self, tag: str, note: Fields | None = None, array: FlatArray | None = None) -> None:
        """Queue a message for the supervisor without waiting.

        Raises:
            Backlog: the queue is full; the same message may be sent again later.
            PeerLost: the supervisor is not connected.
        """
        message = Message(self._me.address, tag, array, note or {}, number=self._sent_count + 1)
        frames: list[bytes | memoryview] = [routing_id(LAUNCHER), encode(message, self._me)]
        if array is not None:
            frames.append(array.data.cast("B") if array.size else b"")
        copy = array is None or array.flags.writeable or array.nbytes < ZERO_COPY
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=copy)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise PeerLost("this process has no connection to the supervisor of the run") from None
            if error.errno == zmq.EAGAIN:
                raise Backlog(f"the supervisor does not accept messages: {QUEUED} messages wait for delivery") from None
            raise
        self._sent_count += 1

    def receive(self) -> Message | None:
        """Return the next message that has arrived from the supervisor; None if no message has arrived.

        Raises:
            ProtocolError: the message breaks the protocol.
        """
        while self._socket.getsockopt(zmq.EVENTS) & _READABLE:  # type: ignore[operator]
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            if frames[0].bytes != routing_id(LAUNCHER) or not 2 <= len(frames) <= 3:
                self.rejected += 1  # a stranger: ZeroMQ accepts any connection
                continue
            payload = frames[2].buffer if len(frames) > 2 else None
            return decode(frames[1].bytes, payload, LAUNCHER, self._me, WELCOME_BYTES)
        return None

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` for a message from the supervisor."""
        self._socket.poll(int(seconds * 1000))

    def close(self, linger: float) -> None:
        """Close the link; queued messages are delivered for up to `linger` seconds."""
        self._socket.close(int(linger * 1000))
        self._context.term()


def send_to_control(control: str, data: bytes, heartbeat: float) -> None:
    """Send one message to the control socket at the address `control`, without waiting for an answer."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    harden(socket, CONTROL_BYTES, heartbeat)
    socket.setsockopt(zmq.LINGER, CONTROL_LINGER_MS)
    socket.connect(control)
    socket.send(data)
    socket.close()
    context.term()


def harden(socket: zmq.Socket[bytes], max_bytes: int, heartbeat: float) -> None:
    """Set the options of every socket of a run: largest message, heartbeats, bounded queues, and a short linger. A peer
    is disconnected once it has been silent for `heartbeat` seconds, and at most a twentieth later.
    """
    socket.setsockopt(zmq.MAXMSGSIZE, max(max_bytes + MAX_CODING, MAX_HEADER))
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(heartbeat * 50))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(heartbeat * 1000))  # counted from a ping, so from no earlier word
    socket.setsockopt(zmq.HEARTBEAT_TTL, int(heartbeat * 1000))
    socket.setsockopt(zmq.SNDHWM, QUEUED)
    socket.setsockopt(zmq.RCVHWM, QUEUED)
    socket.setsockopt(zmq.LINGER, 2000)


def bind(socket: zmq.Socket[bytes], address: str) -> str:
    """Bind the socket and return the address that others connect to.

    Raises:
        ConfigurationError: the address is in use or belongs to another machine, or the path of the socket is too long.
    """
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise cannot_listen(address, zmq.strerror(error.errno or 0)) from None
    endpoint: bytes = socket.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
    return endpoint.decode().rstrip("\0")


def routing_id(address: Address) -> bytes:
    """The ZeroMQ identity of a node's socket; it never starts with a zero byte, which ZeroMQ reserves."""
    return b"n" + address.to_bytes(4, "big", signed=True)
