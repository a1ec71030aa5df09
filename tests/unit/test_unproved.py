"""Strangers at the port of a node: until the other end of a connection is proved, it costs little, changes nothing."""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

import flockstep.links.streams as streams
from flockstep.errors import PeerLost, ProtocolError
from flockstep.links import connection as rules
from flockstep.links.handshake import ENCRYPTED, PLAIN, Handshake, time_for_proof
from flockstep.links.sealed import RECORD
from flockstep.links.streams import StreamBus
from flockstep.links.wire import SenderIdentity
from flockstep.messages import Message
from support.buses import (
    OVER_TCP,
    SECRET,
    Make,
    Relay,
    answered,
    buses,
    greeting,
    introduced,
    join,
    raw_connection,
    relaying,
    still_works,
)

HELLO = {"tcp": PLAIN + bytes(range(32)), "encrypted": ENCRYPTED + bytes(range(32))}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with buses(tmp_path) as made:
        yield made


@pytest.fixture
def crowd() -> Iterator[contextlib.ExitStack]:
    """Strangers' connections, closed after the test."""
    with contextlib.ExitStack() as stack:
        yield stack


def settled(bus: StreamBus) -> None:
    """Let the bus deal with everything that has arrived."""
    while bus._epoll.poll(0.02):
        assert bus.poll(0) is None


@pytest.mark.parametrize("transport", OVER_TCP)
@pytest.mark.parametrize("said", ["nothing", "half", "hello"])
def test_a_stranger_holds_little_memory_and_has_no_key_made(
    make: Make, crowd: contextlib.ExitStack, transport: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, made = make(0, transport), []
    plain = X25519PrivateKey.generate
    monkeypatch.setattr(X25519PrivateKey, "generate", lambda: made.append(plain()) or made[-1])
    words = {"nothing": b"", "half": HELLO[transport][:30], "hello": HELLO[transport]}[said]
    crowd.enter_context(raw_connection(first, words))  # what the first one loads stays
    settled(first)
    tracemalloc.start()
    try:
        for _ in range(50):
            crowd.enter_context(raw_connection(first, words))
        settled(first)
        assert len(first._connections) == 51
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held / 50 < 8 << 10
    assert len(made) == (51 if said == "hello" and transport == "encrypted" else 0)


@pytest.mark.parametrize("transport", OVER_TCP)
def test_a_thousand_idle_connections_take_few_handles_and_keep_nobody_out(
    make: Make, crowd: contextlib.ExitStack, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = make(0, transport), make(1, transport)
    for _ in range(1000):
        crowd.enter_context(raw_connection(first))
        assert first.poll(0) is None
        assert len(first._connections) <= rules.UNPROVED
    join(first, second)
    assert first.traffic.rejected >= 1000 - rules.UNPROVED + 1
    still_works(first, second)
    lines = [record for record in caplog.records if record.levelno == logging.WARNING]
    said = "more than 128 connections were open whose other end had not proved yet that it knows the secret"
    told = (
        f"flockstep: worker 0 refused a connection from 127.0.0.1: {said}; later refused connections are only counted"
    )
    assert [record.getMessage() for record in lines] == [told]


@pytest.mark.parametrize("transport", OVER_TCP)
def test_strangers_that_say_hello_keep_nobody_out(
    make: Make, crowd: contextlib.ExitStack, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer's hello is still under way when its connection is the newest of too many."""
    monkeypatch.setattr(rules, "UNPROVED", 8)
    first, second = make(0, transport), make(1, transport)
    for _ in range(20):
        crowd.enter_context(raw_connection(first, HELLO[transport]))
        settled(first)
    monkeypatch.setattr(streams, "REDIALS", 0)
    join(first, second)
    still_works(first, second)


def test_the_host_with_the_most_connections_gives_way(
    make: Make, crowd: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "UNPROVED", 8)
    first = make(0)
    handshake = Handshake(SECRET, connects=True, encrypts=False, purpose="run worker 0")
    peer = crowd.enter_context(raw_connection(first, handshake.out))
    answered(peer, handshake, first)
    for _ in range(30):
        crowd.enter_context(raw_connection(first, HELLO["tcp"], source="127.0.0.2"))
        settled(first)
    assert first.traffic.rejected == 31 - 8
    assert [one.host for one in first._connections.values()] == ["127.0.0.1", *["127.0.0.2"] * 7]


def test_a_stranger_that_sends_a_byte_now_and_then_is_sent_away(
    make: Make, crowd: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time runs from the beginning of the connection, whatever arrives."""
    first = make(0)
    slow = crowd.enter_context(raw_connection(first))
    for at in range(20):
        slow.sendall(HELLO["tcp"][at : at + 1])
        settled(first)
    (connection,) = first._connections.values()
    first._next_look = 0.0
    first._look(connection.since + time_for_proof(first._heartbeat) - 1)
    assert connection.open
    first._proof_time = 0.0
    slow.sendall(HELLO["tcp"][20:21])
    while connection.open:
        assert first.poll(0.01) is None
    assert first.traffic.rejected == 1


@pytest.mark.parametrize(("heartbeat", "limit"), [(0.5, 20), (5, 20), (60, 240)])
def test_the_time_for_a_proof_grows_with_the_heartbeat(heartbeat: float, limit: float) -> None:
    """Whoever sets a longer heartbeat has busy machines."""
    me = SenderIdentity("run", 0, "schema", 1 << 20, secret=SECRET)
    bus = StreamBus(me, "tcp://127.0.0.1:*", heartbeat=heartbeat)
    with raw_connection(bus):
        settled(bus)
        (connection,) = bus._connections.values()
        for late, stands in ((limit - 1, True), (limit + 1, False)):
            bus._check(connection, connection.since + late, late=False)
            assert connection.open == stands
    bus.close(0)


@pytest.mark.parametrize("transport", OVER_TCP)
def test_a_port_scan_and_garbage_are_counted(make: Make, transport: str) -> None:
    first, second = introduced(make, transport)
    rng = np.random.default_rng(0)
    for number in range(100):
        raw_connection(first, rng.bytes(int(rng.integers(0, 200))) if number % 2 else b"").close()
    while first.traffic.rejected < 100:
        assert first.poll(0.01) is None
    assert len(first._connections) == 1
    still_works(first, second)


@pytest.fixture
def relayed(make: Make) -> Iterator[tuple[StreamBus, StreamBus, Relay]]:
    with relaying(make) as found:
        yield found


def test_a_session_that_was_recorded_and_is_replayed_has_no_effect(relayed: tuple[StreamBus, StreamBus, Relay]) -> None:
    first, second, relay = relayed
    still_works(first, second)
    for end in (3, len(PLAIN) + 32, len(relay.said)):
        before = first.traffic.rejected
        with raw_connection(first, bytes(relay.said[:end])) as stranger:
            stranger.shutdown(socket.SHUT_WR)
            while first.traffic.rejected == before:
                assert first.poll(0.01) is None
    assert first.reachable(1)
    second.send(0, Message(1, "push", number=2))
    while (message := first.poll(0.01)) is None:
        pass
    assert message.number == 2


@pytest.mark.parametrize("what", ["flipped", "cut off", "swapped"])
def test_a_record_that_is_changed_on_its_way_delivers_nothing(
    relayed: tuple[StreamBus, StreamBus, Relay], what: str
) -> None:
    """The message fills several records: of an array of which a part was changed nothing is delivered."""
    first, second, relay = relayed
    still_works(first, second)
    seen = itertools.count()

    def flipped(data: bytes) -> bytes | None:
        changed = bytearray(data)
        changed[-1] ^= 1
        return bytes(changed)

    def cut(data: bytes) -> bytes | None:
        return data[:-1] if next(seen) == 0 else None

    relay.change = {"flipped": flipped, "cut off": cut, "swapped": lambda data: data[::-1]}[what]
    with contextlib.suppress(PeerLost):  # the relay may close while the message is still being written
        second.send(0, Message(1, "push", np.ones(RECORD // 2, np.float32), number=2))
    while not first.broken(0):
        assert first.poll(0.01) is None
        second.poll(0)
    assert first.traffic.rejected == (0 if what == "cut off" else 1)
    assert first.broken(0) == {1}
    assert first.poll(0) is None


@pytest.mark.parametrize("transport", OVER_TCP)
def test_who_does_not_know_the_secret_is_refused(make: Make, transport: str) -> None:
    """A node of the same run, address and schema, but of another secret; then the real one."""
    first, forger, second = make(0, transport), make(1, transport, secret=b"another secret"), make(1, transport)
    first.connect({1: second.address})
    forger.connect({0: first.address})
    while not first.traffic.rejected or not forger.traffic.rejected:
        assert first.poll(0.01) is None
        assert forger.poll(0.01) is None
        assert not first.reachable(1)
    second.connect({0: first.address})
    while not (first.reachable(1) and second.reachable(0)):
        assert first.poll(0.01) is None
        assert second.poll(0.01) is None
    still_works(first, second)


@pytest.mark.parametrize("transport", OVER_TCP)
@pytest.mark.parametrize("said", [b"", greeting(1), b"GET / HTTP/1.1\r\n\r\n" * 9, bytes(1 << 16)])
def test_a_stranger_with_the_right_greeting_does_not_disturb(make: Make, transport: str, said: bytes) -> None:
    first, second = make(0, transport), make(1, transport)
    strangers = [raw_connection(first, said) for _ in range(3)]
    join(first, second)
    while said and first.traffic.rejected < 3:
        assert first.poll(0.01) is None
    still_works(first, second)
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize("transport", OVER_TCP)
def test_who_says_nothing_is_sent_away_after_some_time(
    make: Make, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = introduced(make, transport)
    stranger = raw_connection(first)
    while len(first._connections) < 2:
        first.poll(0.01)
    first._proof_time = 0.0
    while len(first._connections) > 1:
        first.poll(0)
    assert first.traffic.rejected == 1
    still_works(first, second)
    stranger.close()


def test_idle_strangers_are_closed_before_a_peer_in_its_handshake(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "UNPROVED", 3)
    first = make(0, "tcp")
    handshake = Handshake(SECRET, connects=True, encrypts=False, purpose="run worker 0")
    with contextlib.ExitStack() as stack:
        peer = stack.enter_context(raw_connection(first, handshake.out))
        answered(peer, handshake, first)
        for _ in range(9):
            stack.enter_context(raw_connection(first))
        while first.traffic.rejected < 7:
            first.poll(0.01)
        peer.sendall(handshake.out)
        while not any(one.established for one in first._connections.values()):
            first.poll(0.01)
        assert sum(one.established for one in first._connections.values()) == 1


def test_a_proof_that_waits_to_be_read_counts_though_its_time_is_over(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "TICK", 60.0)  # the thread beside the program stays away
    first = make(0, "tcp")
    handshake = Handshake(SECRET, connects=True, encrypts=False, purpose="run worker 0")
    with raw_connection(first, handshake.out) as peer:
        answered(peer, handshake, first)
        peer.sendall(handshake.out)
        first._proof_time = -1.0
        first._look(first._next_look)
        assert [one.established for one in first._connections.values()] == [True]
        assert first.traffic.rejected == 0


def proved(bus: StreamBus, said: bytes) -> socket.socket:
    """A connection of a process that proves the secret, and says that."""
    handshake = Handshake(SECRET, connects=True, encrypts=False, purpose="run worker 0")
    peer = raw_connection(bus, handshake.out)
    answered(peer, handshake, bus)
    peer.sendall(handshake.out + said)
    return peer


@pytest.mark.parametrize("received", ["x", -1, 0.5, float("inf"), 1 << 63])
def test_a_session_that_goes_on_after_an_impossible_number_of_bytes_is_refused(make: Make, received: object) -> None:
    first = make(0, "tcp", sessions=True)
    first.connect({1: "tcp://127.0.0.1:9"})
    with proved(first, greeting(1, session="its key")) as peer:
        while not first.reachable(1):
            assert first.poll(0.01) is None
        with proved(first, greeting(1, session="its key", received=received)):
            with contextlib.suppress(ProtocolError):  # of the peer itself
                while not (first.traffic.rejected or first.traffic.resumed):
                    assert first.poll(0.01) is None
        assert not first.traffic.resumed
        peer.close()


@dataclass
class Stranger:
    host: str
    since: float = 0.0
    begun: bool = False
    established: bool = False


@pytest.mark.parametrize(
    ("flood", "peer"),
    [
        ("10.0.0.1", "10.0.0.2"),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2"),
        ("fd00:0:0:1::5", "fd00:0:0:2::5"),
        ("fe80::1%eth0", "fd00::1"),
    ],
)
def test_a_host_with_many_connections_loses_its_own_only(
    flood: str, peer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at a listener for both protocols, which writes IPv4 addresses as IPv6 addresses."""
    monkeypatch.setattr(rules, "UNPROVED", 4)
    waiting: Any = Stranger(peer)
    connections: list[Any] = [waiting, *(Stranger(flood, begun=True) for _ in range(4))]
    excess = rules.excess(connections)
    assert excess is not None
    assert excess.host == flood
    assert rules.excess(connections[:4]) is None
