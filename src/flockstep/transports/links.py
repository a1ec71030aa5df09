"""What a supervisor and the processes of its run say to each other: a control socket for all, a link to each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

from flockstep.arrays.schema import FlatArray
from flockstep.errors import ProtocolError
from flockstep.messages import Address, Fields, Message, node_name
from flockstep.transports.bus import LAUNCHER
from flockstep.transports.copies import ZERO_COPY
from flockstep.transports.wire import Identity, decode, encode
from flockstep.transports.zeromq import bind, harden, routing_id

CONTROL_BYTES = 1 << 20
"""The largest message that the control socket takes."""
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

    def send(self, tag: str, note: Fields | None = None, array: FlatArray | None = None) -> None:
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
        """Close; what was not delivered yet never will be."""
        self.socket.disable_monitor()
        self._monitor.close()
        self.socket.close(0)


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
