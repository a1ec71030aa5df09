"""Buses in one process, as nodes of a run have them, and whoever else connects to them."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from flockstep.links.handshake import Handshake
from flockstep.links.kinds import Transport
from flockstep.links.streams import StreamBus
from flockstep.links.wire import GREETING, SenderIdentity, encode
from flockstep.messages import Message

Make = Callable[..., StreamBus]
SECRET = b"the secret of the run"
OVER_TCP = ("tcp", "encrypted")
"""Transports whose connections are authenticated: over the loopback, and as between hosts."""


@contextmanager
def buses(folder: Path) -> Iterator[Make]:
    """A function that makes buses, which are closed in the end."""
    made: list[StreamBus] = []

    def bus(
        address: int, transport: str = "tcp", run: str = "run", secret: bytes = SECRET, sessions: bool = False
    ) -> StreamBus:
        me = SenderIdentity(run, address, "schema", 1 << 20, secret=secret)
        if transport == "encrypted" or sessions:  # over the loopback, too
            encrypts = transport == "encrypted"
            one = StreamBus(me, "tcp://127.0.0.1:*", encrypts=encrypts, local_sessions=sessions)
        else:
            one = Transport.parse(transport).bus(me, folder, f"node{len(made)}")
        made.append(one)
        return one

    try:
        yield bus
    finally:
        for one in made:
            one.close(0)


def introduced(make: Make, transport: str = "tcp") -> tuple[StreamBus, StreamBus]:
    """Two buses that are connected."""
    first, second = make(0, transport), make(1, transport)
    join(first, second)
    return first, second


def join(first: StreamBus, second: StreamBus) -> None:
    first.connect({1: second.address})
    second.connect({0: first.address})
    while not (first.reachable(1) and second.reachable(0)):
        assert first.poll(0.01) is None
        assert second.poll(0.01) is None


def arrived(bus: StreamBus, *others: StreamBus) -> Message:
    """The next message; the others continue meanwhile."""
    while (message := bus.poll(0.01)) is None:
        for other in others:
            assert other.poll(0) is None
    return message


def raw_connection(bus: StreamBus, *parts: bytes, source: str = "127.0.0.1") -> socket.socket:
    """Somebody who connects and says that; over TCP from that address."""
    kind, _, place = bus.address.partition("://")
    stranger = socket.socket(socket.AF_UNIX if kind == "ipc" else socket.AF_INET)
    host, _, port = place.rpartition(":")
    if kind != "ipc":
        stranger.bind((source, 0))
    stranger.connect(place if kind == "ipc" else (host, int(port)))
    with contextlib.suppress(OSError):  # it may have been hung up on already
        stranger.sendall(b"".join(parts))
    return stranger


def framed(header: bytes, payload: bytes | None = None) -> bytes:
    follows = 0 if payload is None else 1 << 31
    return struct.pack("<IQQ", len(header) | follows, len(payload or b""), 0) + header + (payload or b"")


def greeting(
    source: int, run: str = "run", schema: str = "schema", tag: str = GREETING, number: int = 0, **note: object
) -> bytes:
    message = Message(source, tag, note={"memory": False, **note}, number=number)
    return framed(encode(message, SenderIdentity(run, source, schema, 1 << 20)))


def still_works(first: StreamBus, second: StreamBus) -> None:
    second.send(0, Message(1, "push", number=1))
    got = arrived(first)
    assert (got.tag, got.source) == ("push", 1)


def answered(peer: socket.socket, handshake: Handshake, bus: StreamBus) -> None:
    """Wait until the bus has answered the hello, which `peer` has sent."""
    peer.setblocking(False)
    data = b""
    while len(data) < handshake.due:
        bus.poll(0.01)
        with contextlib.suppress(BlockingIOError):
            data += peer.recv(handshake.due - len(data))
    handshake.feed(data)


class Relay:
    """Between a node and its peer: hands on what both say, as `change` makes it, and keeps what the node said."""

    def __init__(self, to: str, change: Callable[[bytes], bytes | None] = bytes):
        """`change`: what is said to the peer instead; None ends the connection."""
        self.said = bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "tcp://{}:{}".format(*self._listener.getsockname())
        self._to, self.change = to, change
        self._ends: list[socket.socket] = [self._listener]
        self._threads = [Thread(target=self._run)]
        self._threads[0].start()

    def _run(self) -> None:
        host, port = self._to.removeprefix("tcp://").split(":")
        node, peer = self._listener.accept()[0], socket.create_connection((host, int(port)))
        self._ends += [node, peer]
        self._threads.append(Thread(target=self._hand_on, args=(peer, node, bytes)))
        self._threads[1].start()
        self._hand_on(node, peer, self._kept)

    def _kept(self, data: bytes) -> bytes | None:
        self.said += data
        return self.change(data)

    def _hand_on(self, source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes | None]) -> None:
        with contextlib.suppress(OSError):
            while (data := source.recv(1 << 20)) and (other := change(data)) is not None:
                target.sendall(other)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End both connections."""
        for end in self._ends[1:]:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()


@contextmanager
def relaying(make: Make) -> Iterator[tuple[StreamBus, StreamBus, Relay]]:
    """Two nodes that are connected and encrypt, with an attacker on the way from the second to the first."""
    first, second = make(0, "encrypted"), make(1, "encrypted")
    relay = Relay(first.address)
    first.connect({1: second.address})
    second.connect({0: relay.address})
    while not (first.reachable(1) and second.reachable(0)):
        assert first.poll(0.01) is None
        assert second.poll(0.01) is None
    yield first, second, relay
    relay.close()
