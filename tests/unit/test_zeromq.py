"""Sockets of a run: addresses, strangers, backlogs and peers that went away, in one process."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

import flockstep.transports.zeromq as zeromq
from flockstep.errors import ConfigurationError, PeerLost, ProtocolError
from flockstep.messages import Message
from flockstep.transports.base import Transport
from flockstep.transports.bus import Backlog, Bus
from flockstep.transports.wire import Identity
from flockstep.transports.zeromq import Endpoint, Tcp, routing_id

Make = Callable[[int], Bus]
Stranger = Callable[..., zmq.Socket[bytes]]
TRANSPORT = Tcp()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Bus] = []

    def endpoint(address: int, run: str = "run") -> Bus:
        me = Identity(run, address, "schema", 1 << 20)
        made.append(TRANSPORT.bus(me, Path(), "here", 5.0))
        return made[-1]

    yield endpoint
    for one in made:
        one.close(0)


@pytest.fixture
def stranger(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Stranger]:
    """Connects to an address with a name of its choice."""
    peers: list[zmq.Socket[bytes]] = []

    def connect(to: str, name: bytes | None = None) -> zmq.Socket[bytes]:
        peers.append(context.socket(zmq.DEALER))
        if name is not None:
            peers[-1].setsockopt(zmq.ROUTING_ID, name)
        peers[-1].connect(to)
        return peers[-1]

    yield connect
    for peer in peers:
        peer.close(0)


def introduced(make: Make) -> tuple[Bus, Bus]:
    """Two endpoints that have heard each other."""
    first, second = make(0), make(1)
    first.connect({1: second.address})
    second.connect({0: first.address})
    while not (first.reachable(1) and second.reachable(0)):
        assert first.poll(0.01) is None
        assert second.poll(0.01) is None
    return first, second


def test_messages_go_both_ways_in_order(make: Make) -> None:
    first, second = introduced(make)
    arrays = [np.arange(n, dtype=np.float32) for n in range(5)]
    for number, array in enumerate(arrays, 1):
        second.send(0, Message(1, "push", array, number=number))
    for array in arrays:
        got = first.poll(10)
        assert got is not None
        assert got.payload.tolist() == array.tolist()
    assert first.poll(0) is None


def test_the_array_may_change_once_it_was_sent(make: Make) -> None:
    first, second = introduced(make)
    array = np.zeros(100_000, np.float32)
    second.send(0, Message(1, "push", array, number=1))
    array[:] = 7
    got = first.poll(10)
    assert got is not None
    assert not got.payload.any()


def test_an_unknown_peer_cannot_be_reached(make: Make) -> None:
    first, _ = introduced(make)
    with pytest.raises(PeerLost, match="worker 5 is not reachable from worker 0"):
        first.send(5, Message(0, "hello"))


def test_a_peer_that_left_cannot_be_reached(make: Make) -> None:
    first, second = introduced(make)
    second.close(0)
    first.poll(0.2)
    with pytest.raises(PeerLost, match="worker 1 is not reachable from worker 0"):  # noqa: PT012
        while True:  # until the end of the connection has been noticed
            first.send(1, Message(0, "push", number=1))
            first.poll(0.01)


def test_a_slow_peer_makes_its_sender_wait_and_misses_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zeromq, "QUEUED", 10)
    first, second = introduced(make)
    large = np.zeros(1 << 16, np.float32)
    sent = 0
    with pytest.raises(Backlog, match="worker 0 takes no messages: 10 wait for it"):  # noqa: PT012
        while sent < 10_000:
            second.send(0, Message(1, "push", large, number=sent + 1))
            sent += 1
    assert sent > 0
    for number in range(1, 51):
        got = None
        while got is None:
            if sent < 50:
                with contextlib.suppress(Backlog):
                    second.send(0, Message(1, "push", large, number=sent + 1))
                    sent += 1
            got = first.poll(0.01)
        assert got.number == number
    assert sent == 50
    assert first.poll(0) is None


@pytest.mark.parametrize("name", [None, b"n", b"nobody", routing_id(7), b"n" + b"\xff" * 4])
def test_strangers_are_counted_and_not_heard(name: bytes | None, make: Make, stranger: Stranger) -> None:
    first, second = introduced(make)
    peer = stranger(first.address, name)
    for frames in ([b""], [b"GET / HTTP/1.1"], [b"\x9e", b"x" * 100], [b""] * 9):
        peer.send_multipart(frames)
    while first.rejected < 4:
        assert first.poll(0.1) is None
    second.send(0, Message(1, "push", number=1))
    got = first.poll(10)
    assert got is not None
    assert got.tag == "push"


def test_a_stranger_cannot_take_the_name_of_a_peer_that_is_connected(make: Make, stranger: Stranger) -> None:
    first, second = introduced(make)
    thief = stranger(first.address, routing_id(1))
    thief.send_multipart([b"garbage", b"garbage"])
    assert first.poll(0.3) is None
    second.send(0, Message(1, "push", number=1))
    got = first.poll(10)
    assert got is not None
    assert got.tag == "push"


def test_who_borrows_a_name_before_peers_are_known_is_not_heard(make: Make, stranger: Stranger) -> None:
    first = make(0)
    stranger(first.address, routing_id(7)).send_multipart([b"garbage"])
    while first.rejected < 1:
        assert first.poll(0.1) is None


def test_more_than_one_payload_is_refused(make: Make, stranger: Stranger) -> None:
    first = make(0)
    first.connect({1: "tcp://127.0.0.1:9"})
    stranger(first.address, routing_id(1)).send_multipart([b"header", b"one", b"two"])
    with pytest.raises(ProtocolError, match="worker 1 sent more than one payload with a header"):
        first.poll(10)


def test_a_message_larger_than_the_model_is_not_even_taken_in(make: Make, stranger: Stranger) -> None:
    first, second = introduced(make)
    stranger(first.address).send_multipart([b"x" * (1 << 21)])
    assert first.poll(0.3) is None
    assert first.rejected == 0
    second.send(0, Message(1, "push", number=1))
    assert first.poll(10) is not None


@pytest.mark.parametrize(
    "bytes_sent",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f" + b"\xff" * 64,
        b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f\x03\x00" + b"\0" * 64,
        bytes(range(256)) * 8,
        b"",
    ],
    ids=["http", "greeting", "huge length", "all bytes", "nothing"],
)
def test_raw_bytes_do_not_disturb(bytes_sent: bytes, make: Make) -> None:
    first, second = introduced(make)
    host, _, port = first.address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port))) as raw:
        with contextlib.suppress(OSError):  # it may have been hung up on already
            raw.sendall(bytes_sent)
            raw.shutdown(socket.SHUT_WR)
        assert first.poll(0.2) is None
        second.send(0, Message(1, "push", number=1))
        assert first.poll(10) is not None
    assert first.rejected == 0


def test_tcp_listens_on_loopback_and_a_free_port_of_its_own(make: Make) -> None:
    first, second = make(0), make(1)
    assert first.address.startswith("tcp://127.0.0.1:")
    assert first.address != second.address


@pytest.mark.parametrize("host", ["localhost", "", "::1", "1.2.3", "example.org", "*", "0.0.0.0/0"])
def test_a_host_must_be_an_address(host: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"host must be an IPv4 address of this machine, got .*; use 127\.0\.0\.1"
    ):
        Tcp(host)


def test_a_host_of_another_machine_is_refused() -> None:
    me = Identity("run", 0, "schema", 40)
    address = Transport.parse("tcp(host='192.0.2.1')").listen(Path(), "here")  # of a network kept for documentation
    with pytest.raises(ConfigurationError, match=r"cannot listen on tcp://192\.0\.2\.1:\*: .*; use an address of this"):
        Endpoint(me, address, 5.0)


def test_an_address_in_use_is_refused(make: Make) -> None:
    with pytest.raises(ConfigurationError, match="Address already in use; use an address of this machine"):
        Endpoint(Identity("run", 1, "schema", 40), make(0).address, 5.0)


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    address = Transport.parse("ipc").listen(tmp_path / ("x" * 120), "worker-0")
    with pytest.raises(ConfigurationError, match="; set TMPDIR to a folder with a short path, or use --transport tcp"):
        Endpoint(Identity("run", 1, "schema", 40), address, 5.0)
