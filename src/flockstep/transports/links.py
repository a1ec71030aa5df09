"""What a supervisor and the processes of its run say to each other: a control socket for all, a link to each.

ZeroMQ sockets: a thread of its own answers heartbeats, so that a process that computes for long, also in code that
keeps the interpreter to itself, is not taken for a stopped one, and a stopped one is noticed without its help.
Message sizes are capped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError, PeerLost, ProtocolError
from flockstep.messages import Address, Beside, Fields, Message, node_name
from flockstep.transports.bus import LAUNCHER, Backlog, cannot_listen
from flockstep.transports.wire import MAX_CODING, MAX_HEADER, Identity, decode, encode

CONTROL_BYTES = 1 << 20
"""The largest message that the control socket takes."""
WELCOME_BYTES = 1 << 20
"""The largest header of what a supervisor says, which may name where every node listens: some 150 bytes for each."""
ZERO_COPY = 1 << 18
"""Bytes from which an array is sent from where it lies: below, a copy is cheaper than keeping track of it."""
_READABLE = int(zmq.POLLIN)
QUEUED = 10_000
"""Messages that may wait for the other end before the sender has to wait for it."""
KNOCKING = 20_000
"""Milliseconds in which a word on the control socket must be heard: the first packets over a new network link may be
lost, and are sent again late."""


class Control:
    """The supervisor's socket that any process of the run can speak to, and that opens links to them."""

    def __init__(self, address: str, heartbeat: float):
        """`heartbeat`: seconds of silence after which a node counts as lost.

        Raises:
            ConfigurationError: the address cannot be listened at.
        """
        self._heartbeat = heartbeat
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        harden(self._socket, CONTROL_BYTES, heartbeat)
        self.address = bind(self._socket, address)

    def heard(self) -> Iterator[bytes]:
        """What was said here since the last call."""
        while self._socket.poll(0):
            yield self._socket.recv_multipart()[-1]

    def link(self, address: Address, endpoint: str, me: Identity) -> Wire:
        """A link to the node that listens at `endpoint`; `me` is who the supervisor is for it."""
        return Wire(self._context, address, endpoint, me, self._heartbeat)

    def wait(self, wires: Iterable[Wire], seconds: float) -> bool:
        """Whether there is something to hear, here or on a link, within that time."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        for one in wires:
            poller.register(one.socket, zmq.POLLIN)
        return bool(poller.poll(int(seconds * 1000)))

    def close(self) -> None:
        """Close, once all links are closed."""
        self._socket.close(linger=0)
        self._context.term()


class Wire:
    """The supervisor's end of a link to one node; notices when the node stops answering heartbeats."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: Address, endpoint: str, me: Identity, heartbeat: float
    ):
        self._address = address
        self._me = me
        self._told = 0
        self.socket = context.socket(zmq.DEALER)
        harden(self.socket, me.model_bytes, heartbeat)
        self.socket.setsockopt(zmq.ROUTING_ID, routing_id(LAUNCHER))
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.socket.connect(endpoint)

    def send(self, tag: str, note: Beside | None = None, array: FlatArray | None = None) -> None:
        """Queue a message; never waits. The array must not change afterwards: all links send it from where it lies."""
        message = Message(LAUNCHER, tag, array, note or {}, number=self._told + 1)
        frames: list[bytes | memoryview] = [encode(message, self._me)]
        if array is not None:
            frames.append(array.data.cast("B"))
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=array is None or array.nbytes < ZERO_COPY)
        except zmq.Again:
            return  # The node is gone or takes nothing; its process is watched separately.
        self._told += 1

    def receive(self) -> Message | None:
        """The next message of the node that is here by now.

        Raises:
            ProtocolError: it is not as agreed.
        """
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        if len(frames) > 2:
            raise ProtocolError(f"{node_name(self._address)} sent more than one payload with a header")
        payload = frames[1].buffer if len(frames) > 1 else None
        return decode(frames[0].bytes, payload, self._address, self._me)

    def disconnected(self) -> bool:
        """Whether the connection broke since the last call."""
        broke = False
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            broke = True
        return broke

    def close(self) -> None:
        """Close; what was not delivered yet never will be. Again is harmless."""
        if not self.socket.closed:
            self.socket.disable_monitor()
            self._monitor.close()
            self.socket.close(0)


class Line:
    """A node's end of its link to the supervisor, which connects to `address`."""

    def __init__(self, me: Identity, address: str, heartbeat: float):
        """`heartbeat`: seconds of silence after which the node counts as lost.

        Raises:
            ConfigurationError: the address cannot be listened at.
        """
        self.rejected = 0
        """Messages of strangers, which were not read."""
        self._me = me
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        harden(self._socket, me.model_bytes, heartbeat)
        self._socket.setsockopt(zmq.ROUTING_ID, routing_id(me.address))
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._told = 0
        self._socket.setsockopt(zmq.MAXMSGSIZE, max(me.model_bytes + MAX_CODING, WELCOME_BYTES))
        try:
            self.address = bind(self._socket, address)
        except ConfigurationError:
            self.close(0)
            raise
        self.descriptor: int = self._socket.getsockopt(zmq.FD)  # type: ignore[assignment]
        """Readable once there may be something to `receive`, until that has been called."""

    def send(self, tag: str, note: Fields | None = None, array: FlatArray | None = None) -> None:
        """Queue a message for the supervisor; never waits.

        Raises:
            Backlog: too much is queued already; the same may be sent again later.
            PeerLost: the supervisor is not connected.
        """
        message = Message(self._me.address, tag, array, note or {}, number=self._told + 1)
        frames: list[bytes | memoryview] = [routing_id(LAUNCHER), encode(message, self._me)]
        if array is not None:
            frames.append(array.data.cast("B") if array.size else b"")
        copy = array is None or array.flags.writeable or array.nbytes < ZERO_COPY
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=copy)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise PeerLost("the process that supervises this run is not connected") from None
            if error.errno == zmq.EAGAIN:
                raise Backlog(f"the supervisor takes no messages: {QUEUED} wait for it") from None
            raise
        self._told += 1

    def receive(self) -> Message | None:
        """The supervisor's next message that is here by now.

        Raises:
            ProtocolError: it is not as agreed.
        """
        while self._socket.getsockopt(zmq.EVENTS) & _READABLE:  # type: ignore[operator]
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            if frames[0].bytes != routing_id(LAUNCHER) or not 2 <= len(frames) <= 3:
                self.rejected += 1  # a stranger: ZeroMQ let it connect, nobody in this run sent it
                continue
            payload = frames[2].buffer if len(frames) > 2 else None
            return decode(frames[1].bytes, payload, LAUNCHER, self._me, WELCOME_BYTES)
        return None

    def wait(self, seconds: float) -> None:
        """Wait for something to receive, for up to so many seconds."""
        self._socket.poll(int(seconds * 1000))

    def close(self, linger: float) -> None:
        """Close; what was sent is still delivered, for up to `linger` seconds."""
        self._socket.close(int(linger * 1000))
        self._context.term()


def knock(control: str, data: bytes, heartbeat: float) -> None:
    """Say something on the control socket at that address, which never answers there."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    harden(socket, CONTROL_BYTES, heartbeat)
    socket.setsockopt(zmq.LINGER, KNOCKING)
    socket.connect(control)
    socket.send(data)
    socket.close()
    context.term()


def harden(socket: zmq.Socket[bytes], max_bytes: int, heartbeat: float) -> None:
    """Set what every socket of a run has: size cap, heartbeats, bounded queues, a short linger.

    `heartbeat` is in seconds: a peer that stops answering is disconnected within three quarters of it.
    """
    socket.setsockopt(zmq.MAXMSGSIZE, max(max_bytes + MAX_CODING, MAX_HEADER))
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(heartbeat * 150))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(heartbeat * 600))
    socket.setsockopt(zmq.HEARTBEAT_TTL, int(heartbeat * 1000))
    socket.setsockopt(zmq.SNDHWM, QUEUED)
    socket.setsockopt(zmq.RCVHWM, QUEUED)
    socket.setsockopt(zmq.LINGER, 2000)


def bind(socket: zmq.Socket[bytes], address: str) -> str:
    """Bind and return the address that others connect to.

    Raises:
        ConfigurationError: the address is in use or not ours, or the path of the socket is too long.
    """
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise cannot_listen(address, zmq.strerror(error.errno or 0)) from None
    endpoint: bytes = socket.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
    return endpoint.decode().rstrip("\0")


def routing_id(address: Address) -> bytes:
    """The name of a node's socket; never starts with a zero byte, which ZeroMQ reserves."""
    return b"n" + address.to_bytes(4, "big", signed=True)
