"""ZeroMQ sockets between processes: ipc on one host, tcp between hosts.

One ROUTER socket a node, for every peer. Routing is mandatory (an unreachable peer is an error, not a silent drop),
heartbeats are on (a stopped process is noticed without its help), and message sizes are capped. ZeroMQ's own thread
answers heartbeats, so that a process that computes for long is not taken for a stopped one.
"""

from __future__ import annotations

import ipaddress
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zmq

from flockstep.errors import ConfigurationError, PeerLost, ProtocolError
from flockstep.messages import Address, Array, Message, node_name
from flockstep.transports.base import Transport
from flockstep.transports.bus import LAUNCHER, Backlog, Bus, Traffic
from flockstep.transports.copies import ZERO_COPY, Copies
from flockstep.transports.shared_group import segment_bytes
from flockstep.transports.shared_heap import SharedHeap
from flockstep.transports.shared_memory import SharedMemory
from flockstep.transports.wire import GREETING, MAX_CODING, MAX_HEADER, Identity, decode, encode

SOCKET_BUFFER = 1 << 20
"""Bytes of the system's buffers: 16 MiB go a fifth faster over tcp than with its own choice."""
QUEUED = 10_000
"""Messages that may wait for one peer before the sender has to wait for it."""


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


class Endpoint(Bus):
    """A bus over one ZeroMQ socket; large arrays go through memory where all nodes share some (`share`)."""

    def __init__(self, me: Identity, address: str, heartbeat: float):
        self.rejected = 0
        self.traffic = Traffic()
        self._me = me
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        harden(self._socket, me.model_bytes, heartbeat)
        self._socket.setsockopt(zmq.ROUTING_ID, routing_id(me.address))
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self.address = bind(self._socket, address)
        except ConfigurationError:
            self.close(0)
            raise
        self._peers: set[Address] | None = None
        self._heard: set[Address] = set()
        self._numbers: dict[Address, int] = {}
        self._copies = Copies()
        self._waiter: tuple[int | None, zmq.Poller] | None = None

    def share(self, heap: SharedHeap) -> None:
        """Large arrays go through memory that all nodes share from now on."""
        self._me.heap = self._copies.heap = heap

    def connect(self, peers: Mapping[Address, str]) -> None:
        """Connect to the peers before this node in the order of addresses; the others connect here."""
        me = self._me.address
        self._peers = {LAUNCHER, *peers}
        for peer, endpoint in peers.items():
            if peer < me:
                self._socket.setsockopt(zmq.CONNECT_ROUTING_ID, routing_id(peer))
                self._socket.connect(endpoint)
                self._greet(peer)
        for peer in self._heard:
            self._answer(peer)

    def disconnect(self, peer: Address) -> None:
        """Give up a peer that was lost."""
        self._copies.lost.add(peer)

    def reachable(self, peer: Address) -> bool:
        """Whether the peer has greeted this node."""
        return peer in self._heard and peer not in self._copies.lost

    def lend(self, array: Array) -> Array:
        """A read-only copy in shared memory where there is room, or else in memory that is used again."""
        return self._copies.frozen(array)

    def send(self, to: Address, message: Message) -> None:
        """Queue a message for a peer."""
        heap = self._me.heap
        place = None if message.array is None or heap is None else heap.place(message.array)
        start = 0 if place is None or heap is None else heap.sent(place, to)
        header = encode(message, self._me, -1 if place is None else place, start)
        frames: list[bytes | memoryview] = [routing_id(to), header]
        if message.array is not None and place is None:
            frames.append(message.array.view(np.uint8).data if message.array.size else b"")
        # What may still change is copied at once; a message's own array never changes, and large ones need no copy.
        copy = message.array is None or message.array.flags.writeable or message.array.nbytes < ZERO_COPY
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=copy)
        except zmq.ZMQError as error:
            if place is not None and heap is not None:
                heap.sent(place, to, -1)
            if error.errno == zmq.EHOSTUNREACH:
                raise PeerLost(f"{node_name(to)} is not reachable from {node_name(self._me.address)}") from None
            if error.errno == zmq.EAGAIN:
                raise Backlog(f"{node_name(to)} takes no messages: {QUEUED} wait for it") from None
            raise
        if to != LAUNCHER and message.tag != GREETING:
            self.traffic.sent(message, len(header))

    def poll(self, seconds: float | None, also: int | None = None) -> Message | None:
        """The next message from a peer or the launcher."""
        while True:
            if (seconds is not None or also is not None) and not self._socket.poll(0):
                if seconds == 0 or not self._wait(seconds, also):
                    return None
                if not self._socket.poll(0):
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
                message = decode(header, payload.buffer if payload is not None else None, sender, self._me)
            except ProtocolError:
                if self._peers is not None or sender == LAUNCHER:
                    raise
                self.rejected += 1  # nobody is known yet: this one only borrowed a name
                continue
            if message.tag == GREETING:
                self._heard.add(sender)
                if self._peers is not None:
                    self._answer(sender)
                continue
            if sender != LAUNCHER:
                self.traffic.received(message)
            return message

    def close(self, linger: float) -> None:
        """Close the socket."""
        self._socket.close(int(linger * 1000))
        self._context.term()

    def _wait(self, seconds: float | None, also: int | None) -> bool:
        if self._waiter is None or self._waiter[0] != also:
            self._waiter = also, zmq.Poller()
            for one in (self._socket, also):
                if one is not None:
                    self._waiter[1].register(one, zmq.POLLIN)
        return bool(self._waiter[1].poll(None if seconds is None else int(seconds * 1000)))

    def _greet(self, peer: Address) -> None:
        self.send(peer, Message(self._me.address, GREETING))

    def _answer(self, peer: Address) -> None:
        """Greet a peer that connected to this node; the others were greeted first."""
        if peer > self._me.address:
            self._greet(peer)

    def _more(self) -> int:
        return self._socket.getsockopt(zmq.RCVMORE)  # type: ignore[return-value]

    def _named(self, name: bytes) -> Address | None:
        """Who a socket's name stands for; None for a stranger. Peers may speak before this node knows them all."""
        if len(name) != 5 or name[:1] != b"n":
            return None
        address = int.from_bytes(name[1:], "big", signed=True)
        return address if self._peers is None or address in self._peers else None
