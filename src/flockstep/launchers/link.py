"""The supervisor's line to one process of a run."""

from __future__ import annotations

from collections.abc import Mapping

import zmq
from zmq.utils.monitor import recv_monitor_message

from flockstep.arrays.schema import FlatArray
from flockstep.drivers.member import Hello
from flockstep.errors import ProtocolError
from flockstep.messages import Address, Message, Note, node_name
from flockstep.transports.wire import Identity, decode, encode
from flockstep.transports.zeromq import LAUNCHER, ZERO_COPY, harden, routing_id

FOR_ALL = ("lost", "left", "stop")
"""What a process has to hear at once, wherever it listens at the moment."""


class Link:
    """A socket to a node's own; notices when the node stops answering heartbeats."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], hello: Hello, heartbeat: float):
        self.hello = hello
        self.address = hello.address
        self.heartbeat = heartbeat
        self.beside: Link | None = None
        """The line to the mover that the process has beside its place in the run."""
        self._me = Identity(hello.run, LAUNCHER, hello.schema.hash, hello.largest)
        self.socket = context.socket(zmq.DEALER)
        harden(self.socket, hello.largest, heartbeat)
        self.socket.setsockopt(zmq.ROUTING_ID, routing_id(LAUNCHER))
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.socket.connect(hello.endpoint)

    def tell(self, tag: str, note: Note | None = None, array: FlatArray | None = None) -> None:
        """Queue a message for the node, and what concerns all for its mover; never waits for it.

        The array must not change afterwards: all links send it from where it lies.
        """
        if self.beside is not None and tag in FOR_ALL:
            self.beside.tell(tag, note)
        message = Message(LAUNCHER, tag, array, note or {})
        frames: list[bytes | memoryview] = [encode(message, self.address, self._me)]
        if array is not None:
            frames.append(array.data.cast("B"))
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=array is None or array.nbytes < ZERO_COPY)
        except zmq.Again:
            return  # The node is gone or takes nothing; its process is watched separately.

    def dismiss(self, result: FlatArray | None, buffers: Mapping[Address, FlatArray | None]) -> None:
        """Tell the node to leave; where it wants the resulting model, with the final buffers of every worker."""
        for rank, array in buffers.items():
            if result is not None and array is not None and self.address >= 0:
                self.tell("buffers", {"rank": rank}, array)
        self.tell("end", None, result)

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
            raise ProtocolError(f"{node_name(self.address)} sent more than one payload with a header")
        payload = frames[1].buffer if len(frames) > 1 else None
        return decode(frames[0].bytes, payload, self.address, self._me)

    def disconnected(self) -> bool:
        """Whether the connection broke since the last call."""
        broke = False
        while self.monitor.poll(0):
            recv_monitor_message(self.monitor)
            broke = True
        return broke

    def close(self) -> None:
        """Close; what was not delivered yet never will be."""
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close(0)
        if self.beside is not None:
            self.beside.close()
