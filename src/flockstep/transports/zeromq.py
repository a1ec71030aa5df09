"""ZeroMQ sockets between processes: ipc on one host, tcp between hosts.

One ROUTER socket a node, for every peer. Routing is mandatory (an unreachable peer is an error, not a silent drop),
heartbeats are on (a stopped process is noticed without its help), and message sizes are capped. ZeroMQ's own thread
answers heartbeats, so that a process that computes for long is not taken for a stopped one.
"""

from __future__ import annotations

import ipaddress
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zmq

from flockstep.errors import ConfigurationError, PeerLost, ProtocolError
from flockstep.messages import Address, Message, node_name
from flockstep.transports.base import Transport
from flockstep.transports.shared_group import segment_bytes
from flockstep.transports.shared_memory import SharedMemory
from flockstep.transports.wire import MAX_CODING, MAX_HEADER, Identity, decode, encode

LAUNCHER: Address = 1 << 30
"""The address of the process that supervises the run."""
ZERO_COPY = 1 << 18
"""Bytes from which an array is sent from where it lies: below, a copy is cheaper than keeping track of it."""
SOCKET_BUFFER = 1 << 20
"""Bytes of the system's buffers: 16 MiB go a fifth faster over tcp than with its own choice."""
QUEUED = 10_000
"""Messages that may wait for one peer before the sender has to wait for it."""


class Backlog(PeerLost):
    """The peer is there, and so many messages wait for it that it takes no more at the moment."""


@dataclass(frozen=True)
class Ipc(Transport):
    """Unix sockets in a directory of the run that only its owner can enter."""

    def listen(self, directory: Path, name: str) -> str:
        """A socket file in the run's directory."""
        return f"ipc://{directory / name}"


@dataclass(frozen=True)
class InSharedMemory(Ipc):
    """Unix sockets for messages; large payloads and sums in shared memory. Linux, on x86-64 or AArch64."""

    def __post_init__(self) -> None:
        if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
            raise ConfigurationError(
                f"shared memory needs Linux on x86_64 or aarch64, got {sys.platform} on {platform.machine()}; use "
                "--transport ipc"
            )

    def share(self, workers: int, servers: int, model_bytes: int) -> SharedMemory:
        """A new segment; what of it is not used takes no memory."""
        return SharedMemory.create(segment_bytes(workers, servers, model_bytes))


@dataclass(frozen=True)
class Tcp(Transport):
    """TCP on a free port of `host`; loopback unless told otherwise."""

    host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        try:
            ipaddress.IPv4Address(self.host)
        except ValueError:
            raise ConfigurationError(
                f"host must be an IPv4 address of this machine, got {self.host!r}; use 127.0.0.1"
            ) from None

    def listen(self, directory: Path, name: str) -> str:
        """Any free port."""
        return f"tcp://{self.host}:*"


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
    for buffer in (zmq.SNDBUF, zmq.RCVBUF):
        socket.setsockopt(buffer, SOCKET_BUFFER)


def bind(socket: zmq.Socket[bytes], address: str) -> str:
    """Bind and return the address that others connect to.

    Raises:
        ConfigurationError: the address is in use or not ours, or the path of the socket is too long.
    """
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        way_out = (
            "use an address of this machine, such as 127.0.0.1"
            if address.startswith("tcp:")
            else "set TMPDIR to a folder with a short path, or use --transport tcp"
        )
        raise ConfigurationError(f"cannot listen on {address}: {zmq.strerror(error.errno or 0)}; {way_out}") from None
    endpoint: bytes = socket.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
    return endpoint.decode().rstrip("\0")


def routing_id(address: Address) -> bytes:
    """The name of a node's socket; never starts with a zero byte, which ZeroMQ reserves."""
    return b"n" + address.to_bytes(4, "big", signed=True)


class Endpoint:
    """A node's socket, connected to its peers."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], me: Identity, address: str, heartbeat: float):
        self.me = me
        self.rejected = 0
        self._socket = context.socket(zmq.ROUTER)
        harden(self._socket, me.model_bytes, heartbeat)
        self._socket.setsockopt(zmq.ROUTING_ID, routing_id(me.address))
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self.address = bind(self._socket, address)
        except ConfigurationError:
            self._socket.close(0)
            raise
        self._peers: set[Address] | None = None

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """For a poller that waits for other things too."""
        return self._socket

    def expect(self, peers: dict[Address, str]) -> None:
        """Connect to the peers before this node in the order of addresses; the others will connect here."""
        self._peers = {LAUNCHER, *peers}
        for peer, endpoint in peers.items():
            if peer < self.me.address:
                self._socket.setsockopt(zmq.CONNECT_ROUTING_ID, routing_id(peer))
                self._socket.connect(endpoint)

    def send(self, to: Address, message: Message) -> int:
        """Queue a message for a peer without waiting; return the bytes of its header.

        Raises:
            Backlog: too much is queued for it already; the same message may be sent again later.
            PeerLost: the peer is not connected.
        """
        place = self._place(message)
        start = 0 if place < 0 or self.me.heap is None else self.me.heap.sent(place, to)
        header = encode(message, to, self.me, place, start)
        frames: list[bytes | memoryview] = [routing_id(to), header]
        if message.array is not None and place < 0:
            frames.append(message.array.view(np.uint8).data if message.array.size else b"")
        # What may still change is copied at once; a message's own array never changes, and large ones need no copy.
        copy = message.array is None or message.array.flags.writeable or message.array.nbytes < ZERO_COPY
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=copy)
        except zmq.ZMQError as error:
            self.me.sent[to] -= 1
            if place >= 0 and self.me.heap is not None:
                self.me.heap.sent(place, to, -1)
            if error.errno == zmq.EHOSTUNREACH:
                raise PeerLost(f"{node_name(to)} is not reachable from {node_name(self.me.address)}") from None
            if error.errno == zmq.EAGAIN:
                raise Backlog(f"{node_name(to)} takes no messages: {QUEUED} wait for it") from None
            raise
        return len(header)

    def _place(self, message: Message) -> int:
        """Which slot of shared memory the message's array lies in; -1: none."""
        place = None if message.array is None or self.me.heap is None else self.me.heap.place(message.array)
        return -1 if place is None else place

    def receive(self, seconds: float | None) -> Message | None:
        """The next message from a peer or the launcher; None if nothing came within `seconds` (None: for ever)."""
        while True:
            if seconds is not None and not self._socket.poll(int(seconds * 1000)):
                return None
            sender = self._named(self._socket.recv())
            header = self._socket.recv() if self._more() else b""
            payload = self._socket.recv(copy=False) if self._more() else None
            extra = False
            while self._more():
                self._socket.recv()
                extra = True
            if sender is None:
                # A stranger: ZeroMQ let it connect, nobody in this run sent it. Counted, never parsed.
                self.rejected += 1
                continue
            try:
                if extra:
                    raise ProtocolError(f"{node_name(sender)} sent more than one payload with a header")
                return decode(header, payload.buffer if payload is not None else None, sender, self.me)
            except ProtocolError:
                if self._peers is not None or sender == LAUNCHER:
                    raise
                self.rejected += 1  # nobody is known yet: this one only borrowed a name

    def _more(self) -> int:
        return self._socket.getsockopt(zmq.RCVMORE)  # type: ignore[return-value]

    def _named(self, name: bytes) -> Address | None:
        """Who a socket's name stands for; None for a stranger. Peers may speak before this node knows them all."""
        if len(name) != 5 or name[:1] != b"n":
            return None
        address = int.from_bytes(name[1:], "big", signed=True)
        return address if self._peers is None or address in self._peers else None

    def close(self, linger: float) -> None:
        """Close the socket; what was sent is still delivered, for up to `linger` seconds."""
        self._socket.close(int(linger * 1000))
