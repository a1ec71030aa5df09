"""Connections of a run: addresses, strangers, backlogs, memory and peers that went away, in one process."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

import flockstep.transports.streams as streams
from flockstep.drivers.messenger import Messenger
from flockstep.drivers.runner import Runner
from flockstep.errors import CompositionError, ConfigurationError, PeerLost, ProtocolError
from flockstep.messages import Message, Wanted
from flockstep.nodes import Cluster, Peer
from flockstep.transports import shared_memory
from flockstep.transports.base import Transport
from flockstep.transports.bus import Backlog, Bus
from flockstep.transports.handshake import Handshake
from flockstep.transports.kinds import Tcp
from flockstep.transports.shared_heap import PeerMemory
from flockstep.transports.streams import StreamBus
from flockstep.transports.wire import GREETING, SenderIdentity, encode

Make = Callable[..., StreamBus]
CAN_UNSHARE = bool(shutil.which("ip") and shutil.which("unshare")) and not subprocess.call(["unshare", "-rn", "true"])
SECRET = b"the secret of the run"
SEALED = ("authenticated", "encrypted")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[StreamBus] = []

    def bus(address: int, transport: str = "tcp", run: str = "run", secret: bytes = SECRET) -> StreamBus:
        me = SenderIdentity(run, address, "schema", 1 << 20)
        if transport in SEALED:
            me.secret = secret
            one: Bus = StreamBus(me, "tcp://127.0.0.1:*", encrypts=transport == "encrypted")
        else:
            one = Transport.parse(transport).bus(me, tmp_path, f"node{len(made)}")
        assert isinstance(one, StreamBus)
        made.append(one)
        return one

    yield bus
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


def raw_connection(bus: StreamBus, *parts: bytes) -> socket.socket:
    """Somebody who connects and says that."""
    host, _, port = bus.address.removeprefix("tcp://").rpartition(":")
    stranger = socket.create_connection((host, int(port)))
    with contextlib.suppress(OSError):  # it may have been hung up on already
        stranger.sendall(b"".join(parts))
    return stranger


def framed(header: bytes, payload: bytes | None = None) -> bytes:
    follows = 0 if payload is None else 1 << 31
    return struct.pack("<IQ", len(header) | follows, len(payload or b"")) + header + (payload or b"")


def greeting(source: int, run: str = "run", schema: str = "schema", tag: str = GREETING, number: int = 0) -> bytes:
    message = Message(source, tag, note={"memory": 0}, number=number)
    return framed(encode(message, SenderIdentity(run, source, schema, 1 << 20)))


def still_works(first: StreamBus, second: StreamBus) -> None:
    second.send(0, Message(1, "push", number=1))
    got = arrived(first)
    assert (got.tag, got.source) == ("push", 1)


@pytest.mark.parametrize("transport", ["tcp", *SEALED, "ipc", pytest.param("shared_memory", marks=LINUX)])
def test_messages_go_both_ways_in_order(make: Make, transport: str) -> None:
    first, second = introduced(make, transport)
    arrays = [np.arange(n, dtype=np.float32) for n in (0, 1, 2, 1000, 70_000, 200_000, 5)]
    for number, array in enumerate(arrays, 1):
        second.send(0, Message(1, "push", array, number=number))
    for array in arrays:
        got = arrived(first, second)
        assert np.array_equal(got.payload, array)
        assert not got.payload.flags.writeable
    assert first.poll(0) is None
    second.send(0, Message(1, "none", number=len(arrays) + 1))
    assert arrived(first).array is None
    assert second.traffic.sent_bytes == first.traffic.received_bytes == sum(array.nbytes for array in arrays)
    assert second.traffic.messages_sent == first.traffic.messages_received == len(arrays) + 1
    first.send(1, Message(0, "back", number=1))
    assert arrived(second).tag == "back"


@pytest.mark.parametrize("transport", ["tcp", *SEALED])
@pytest.mark.parametrize("size", [1000, 200_000])
def test_the_array_may_change_once_it_was_sent(make: Make, size: int, transport: str) -> None:
    """Also where most of it has to wait, since nobody reads."""
    first, second = introduced(make, transport)
    array = np.zeros(size, np.float32)
    for number in range(1, 21):
        second.send(0, Message(1, "push", array, number=number))
        array[:] = number
    for number in range(20):
        assert (arrived(first, second).payload == number).all()


@pytest.mark.parametrize("transport", ["tcp", *SEALED])
def test_what_was_received_stays_as_long_as_somebody_holds_it(make: Make, transport: str) -> None:
    first, second = introduced(make, transport)
    held = []
    for number in range(1, 31):
        second.send(0, Message(1, "push", np.full(50_000, number, np.float32), number=number))
        held.append(arrived(first, second).payload)
    assert [int(array[0]) for array in held] == [int(array[-1]) for array in held] == list(range(1, 31))


@pytest.mark.parametrize("transport", ["tcp", *SEALED])
def test_messages_arrive_while_the_program_is_elsewhere(make: Make, transport: str) -> None:
    """More than the sockets hold: the thread beside the program takes it in, and sends what waits."""
    first, second = introduced(make, transport)
    for number in range(1, 41):
        second.send(0, Message(1, "push", np.full(250_000, number, np.float32), number=number))
    while first._unread < 40 * 1_000_000:
        pass
    for number in range(1, 41):
        got = first.poll(0)
        assert got is not None
        assert (got.payload == number).all()


def test_an_unknown_peer_cannot_be_reached(make: Make) -> None:
    first, _ = introduced(make)
    with pytest.raises(PeerLost, match="worker 5 is not reachable from worker 0"):
        first.send(5, Message(0, "hello"))


@pytest.mark.parametrize("given_up", [False, True])
def test_a_peer_that_left_cannot_be_reached(make: Make, given_up: bool) -> None:
    first, second = introduced(make)
    if given_up:
        first.disconnect(1)
        assert not first.reachable(1)
    else:
        second.close(0)
        while first.reachable(1):
            first.poll(0.01)
    with pytest.raises(PeerLost, match="worker 1 is not reachable from worker 0"):
        first.send(1, Message(0, "push", number=1))


@pytest.mark.parametrize("transport", ["tcp", *SEALED])
def test_what_was_sent_before_closing_arrives(make: Make, transport: str) -> None:
    first, second = introduced(make, transport)
    for number in range(1, 4):
        second.send(0, Message(1, "push", np.full(10_000, number, np.float32), number=number))
    second.close(1)
    assert [int(arrived(first).payload[0]) for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("transport", ["tcp", *SEALED])
def test_a_slow_peer_makes_its_sender_wait_and_misses_nothing(
    make: Make, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "QUEUED", 10)
    monkeypatch.setattr(streams, "UNREAD", -1)  # else the thread beside it takes in all
    first, second = introduced(make, transport)
    large = np.zeros(1 << 16, np.float32)
    sent = 0
    with pytest.raises(Backlog, match=r"worker 0 takes no messages: [0-9]+ bytes wait for it"):  # noqa: PT012
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
            second.poll(0)
            got = first.poll(0.01)
        assert got.number == number
    assert sent == 50
    assert first.poll(0) is None


@pytest.mark.parametrize(
    "said",
    [
        framed(b""),
        framed(b"GET / HTTP/1.1"),
        framed(b"x" * 5000),
        framed(b"header", b"payload"),
        greeting(1, run="another"),
        greeting(1, schema="another"),
        greeting(0),
        greeting(-1),
        greeting(7),
        greeting(1 << 30),
        greeting(1, number=1),
        greeting(1, tag="push", number=1),
        struct.pack("<IQ", 5, 1 << 60) + b"hello",
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        bytes(range(256)) * 8,
    ],
)
def test_who_does_not_belong_to_the_run_is_hung_up_on(said: bytes, make: Make) -> None:
    first, second = introduced(make)
    with raw_connection(first, said) as stranger:
        while not first.rejected:
            assert first.poll(0.01) is None
        stranger.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    still_works(first, second)


def test_who_says_too_little_does_not_disturb(make: Make) -> None:
    first, second = introduced(make)
    with raw_connection(first), raw_connection(first, b"\0" * 3) as half, raw_connection(first, greeting(1)[:20]):
        half.shutdown(socket.SHUT_WR)
        assert first.poll(0.01) is None
        still_works(first, second)
    assert first.rejected == 0


def test_a_stranger_cannot_take_the_name_of_a_peer_that_is_connected(make: Make) -> None:
    first, second = introduced(make)
    with raw_connection(first, greeting(1), framed(b"garbage")):
        while not first.rejected:
            assert first.poll(0.01) is None
        still_works(first, second)


def test_who_speaks_before_it_was_let_in_is_hung_up_on(make: Make) -> None:
    """Nobody knows yet who takes part; who has greeted has to wait for an answer."""
    first, second = make(0), make(1)
    push = encode(Message(1, "push", number=1), SenderIdentity("run", 1, "schema", 1 << 20))
    with raw_connection(first, greeting(1), framed(push)):
        while not first.rejected:
            assert first.poll(0.01) is None
        join(first, second)
        still_works(first, second)


def test_only_so_many_may_stand_without_a_greeting(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "STRANGERS", 3)
    first, second = introduced(make)
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(raw_connection(first))
        while first.rejected < 2:
            assert first.poll(0.01) is None
        still_works(first, second)


def test_silent_strangers_before_the_run_has_met_keep_nobody_out(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "STRANGERS", 3)
    first, second = make(0), make(1)
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(raw_connection(first))
            assert first.poll(0.01) is None
        join(first, second)
        still_works(first, second)
    assert first.rejected == 3


def as_peer(make: Make) -> tuple[StreamBus, socket.socket]:
    """A bus, and a bare socket that it takes for worker 1."""
    first = make(0)
    first.connect({1: "tcp://127.0.0.1:9"})
    peer = raw_connection(first, greeting(1))
    while not first.reachable(1):
        assert first.poll(0.01) is None
    return first, peer


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (framed(b"garbage"), "worker 1 sent a header that is not protocol"),
        (struct.pack("<IQ", 1 << 20, 0), "worker 1 announced a header of 1048576 bytes"),
        (struct.pack("<IQ", 5 | 1 << 31, 1 << 40), "and a payload of 1099511627776; the model has 1048576"),
    ],
)
def test_what_a_peer_says_must_be_as_agreed(said: bytes, sentence: str, make: Make) -> None:
    first, peer = as_peer(make)
    with peer:
        peer.sendall(said)
        with pytest.raises(ProtocolError, match=sentence):
            first.poll(10)
        with pytest.raises(PeerLost, match="worker 1 is not reachable"):
            first.send(1, Message(0, "push", number=1))


def test_a_message_may_come_in_pieces(make: Make) -> None:
    first, peer = as_peer(make)
    array = np.arange(30_000, dtype=np.float32)
    me = SenderIdentity("run", 1, "schema", 1 << 20)
    data = b"".join(
        framed(encode(Message(1, "push", array, number=number), me), array.tobytes()) for number in range(1, 4)
    )
    cuts = [0, 1, 5, 12, 13, 60, 150, 1000, 120_000, 120_163, 250_000, 250_001, len(data)]
    got = []
    with peer:
        for low, high in itertools.pairwise(cuts):
            peer.sendall(data[low:high])
            while (message := first.poll(0.01)) is not None:
                got.append(message.payload)
    assert len(got) == 3
    assert all(np.array_equal(one, array) for one in got)


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


def test_a_host_of_another_machine_is_refused(make: Make) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot listen on tcp://192\.0\.2\.1:\*: .*; use an address of this"):
        make(0, "tcp(host='192.0.2.1')")  # of a network kept for documentation


def test_an_address_in_use_is_refused(make: Make) -> None:
    with pytest.raises(ConfigurationError, match="Address already in use; use an address of this machine"):
        StreamBus(SenderIdentity("run", 1, "schema", 40), make(0).address)


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    address = Transport.parse("ipc").listen(tmp_path / ("x" * 120), "worker-0")
    with pytest.raises(ConfigurationError, match="; set TMPDIR to a folder with a short path, or use --transport tcp"):
        StreamBus(SenderIdentity("run", 1, "schema", 40), address)


@LINUX
@pytest.mark.parametrize("transport", ["shared_memory", "tcp(memory=true)"])
def test_large_arrays_stay_in_memory_that_both_reach(make: Make, transport: str) -> None:
    first, second = introduced(make, transport)
    array = np.arange(50_000, dtype=np.float32)
    copy = second.copy_for_sending(array)
    assert second.copy_for_sending(copy) is copy
    peer_memory = first._me.peer_memory[1]._memory
    start = peer_memory.array(np.uint8, 1).ctypes.data
    for number, sent in enumerate((copy, array), 1):
        second.send(0, Message(1, "push", sent, number=number))
        got = arrived(first)
        assert np.array_equal(got.payload, array)
        assert 0 < got.payload.ctypes.data - start < peer_memory.size


@LINUX
def test_between_hosts_nothing_is_lent(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make(0, "tcp(memory=true)"), make(1, "tcp(memory=true)")
    monkeypatch.setattr(shared_memory, "_host", lambda: "another")
    join(first, second)
    assert not first._me.peer_memory
    assert not second._me.peer_memory
    second.send(0, Message(1, "push", np.arange(50_000, dtype=np.float32), number=1))
    assert arrived(first).payload[-1] == 49_999


@LINUX
def test_memory_that_is_not_the_peers_is_noticed(make: Make) -> None:
    told = make(0, "tcp(memory=true)").address.partition(" ")[2]
    assert PeerMemory(told, 1) is not None
    with pytest.raises(CompositionError, match="is not as expected"):
        PeerMemory("00" * 16 + told[32:], 1)


def test_a_header_that_is_nested_too_deep_is_refused(make: Make) -> None:
    first, second = introduced(make)
    header = b"\x9f" + b"\x00\xa0\x00\x00\x00\xa0\xa0\x00\x00\x00\xa0\x00\x00\x00"
    stranger = raw_connection(first, framed(header + b"\x91" * (1023 - len(header)) + b"\x00"))
    while not first.rejected:
        first.poll(0.01)
    stranger.close()
    still_works(first, second)


def test_what_may_still_change_is_sent_as_it_was(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A view that cannot be written, of memory that can: it waits for a receiver that takes nothing meanwhile."""
    monkeypatch.setattr(streams, "UNREAD", -1)
    first, second = introduced(make)
    array = np.zeros(1 << 17, np.float64)
    shown = array[:]
    shown.flags.writeable = False
    for number in range(1, 13):
        array[:] = number
        second.send(0, Message(1, "push", shown, number=number))
    array[:] = 99
    for number in range(1, 13):
        got = arrived(first, second).payload
        assert (got == number).all()
        del got


def test_what_was_sent_before_the_end_is_read_though_nothing_can_be_written(make: Make) -> None:
    first, second = introduced(make)
    for number in range(1, 6):
        second.send(0, Message(1, "push", number=number))
    second.close(1)
    with contextlib.suppress(PeerLost):
        for number in range(1, 50):
            first.send(1, Message(0, "pull", np.zeros(1 << 17), number=number))
    assert [arrived(first).number for _ in range(5)] == [1, 2, 3, 4, 5]
    while first.broken(0) != {1}:
        first.poll(0.01)
    assert first.broken(1000) == set()


@LINUX
def test_a_forked_child_frees_nothing_of_its_parent_s(make: Make) -> None:
    first, second = introduced(make, "shared_memory")
    second.send(0, Message(1, "push", second.copy_for_sending(np.full(100_000, 7, np.float32)), number=1))
    message = arrived(first, second)
    held = message.payload
    if (child := os.fork()) == 0:
        del held, message
        os._exit(0)
    os.waitpid(child, 0)
    for number in range(2, 8):
        second.send(0, Message(1, "push", second.copy_for_sending(np.full(100_000, number, np.float32)), number=number))
    assert (held == 7).all()


def test_bytes_that_wait_for_a_peer_are_bounded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "AHEAD", 1 << 20)
    monkeypatch.setattr(streams, "UNREAD", -1)  # else the thread beside it takes in all
    first, second = introduced(make)
    sent, array = 0, np.zeros(1 << 16)
    with pytest.raises(Backlog, match="worker 0 takes no messages"):  # noqa: PT012
        while sent < 1000:
            second.send(0, Message(1, "push", array, number=sent + 1))
            sent += 1
    assert 1 << 20 <= second.waiting(0) < (1 << 20) + array.nbytes + 1000
    got = 0
    while got < sent:
        got += first.poll(0.001) is not None
        second.poll(0)
    assert second.waiting(0) == 0


class Undriven(Messenger):
    """Moves the messages of a node without a program."""

    def drive(self, runner: Runner) -> None:
        """There is nothing to wait for."""


def test_messages_keep_their_order_where_a_receiver_is_slow(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a background task sends while an earlier message waits for room goes after that one."""
    monkeypatch.setattr(streams, "QUEUED", 5)
    monkeypatch.setattr(streams, "UNREAD", -1)
    first, second = introduced(make)
    node = Peer(1, Cluster(2), np.zeros(4, np.float32), np.random.default_rng(0))
    Undriven(second, second.poll, node, None)
    got: list[tuple[int, str]] = []

    def receiver() -> None:
        first.send(1, Message(0, "ping/echo", number=1))
        while len(got) < 31:
            if (message := first.poll(0.01)) is not None:
                got.append((message.number, message.tag))

    async def echo() -> None:
        await node.receive("ping", 0)
        node.send(0, "pong")

    node.background("echo", echo())
    thread = Thread(target=receiver, daemon=True)
    big = np.zeros(1 << 17, np.float64)
    for number in range(30):
        node.send(0, "push", big)
        if number == 8:
            thread.start()
    while thread.is_alive():
        second.poll(0.01)
    assert [number for number, _ in got] == list(range(1, 32))
    assert "pong/echo" in {tag for _, tag in got}


class Interrupted(Exception):
    """What a signal's handler raises."""


class Interrupting:
    """A socket, or whatever else, whose method raises after it has done its work, as a handler may."""

    def __init__(self, inner: Any, method: str, partly: int = 0):
        self.inner, self.method, self.partly = inner, method, partly

    def __getattr__(self, name: str) -> Any:
        def interrupted(*arguments: Any) -> Any:
            self.method = ""
            if self.partly:
                self.inner.send(arguments[0][0][: self.partly])
            raise Interrupted("in the middle")

        return interrupted if name == self.method else getattr(self.inner, name)


def test_a_handler_that_raises_while_bytes_are_sent_leaves_no_half_of_a_message(make: Make) -> None:
    """How much of it has gone is not known: the receiver hears that the connection broke, and nothing that is wrong."""
    first, second = introduced(make)
    connection: Any = second._peers[0]
    connection.socket = Interrupting(connection.socket, "sendmsg", 5)
    with pytest.raises(Interrupted, match="in the middle"):
        second.send(0, Message(1, "push", np.ones(3), number=1))
    with pytest.raises(PeerLost, match="worker 0 is not reachable"):
        second.send(0, Message(1, "push", np.ones(3), number=2))
    while not first.broken(0):
        assert first.poll(0.01) is None


def test_a_handler_that_raises_while_a_message_is_waited_for_does_no_harm(make: Make) -> None:
    first, second = introduced(make)
    inner = first._epoll
    first._epoll = Interrupting(inner, "poll")  # type: ignore[assignment]
    with pytest.raises(Interrupted, match="in the middle"):
        first.poll(None)
    first._epoll = inner
    second.send(0, Message(1, "push", np.ones(3), number=1))
    while not first._inbox:  # the thread beside the program takes it in
        pass
    assert arrived(first).number == 1


def test_what_has_to_wait_is_copied_though_a_handler_raises(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "UNREAD", -1)
    first, second = introduced(make)
    array = np.zeros(1 << 17, np.float64)
    number, inner = 0, second._epoll
    while not second._peers[0].out:
        number += 1
        if number == 3:  # the system's buffers are full after two at the earliest
            second._epoll = Interrupting(inner, "poll")  # type: ignore[assignment]
        array[:] = number
        with contextlib.suppress(Interrupted):
            second.send(0, Message(1, "push", array, number=number))
    second._epoll = inner
    array[:] = 99
    for expected in range(1, number + 1):
        assert (arrived(first, second).payload == expected).all()


def test_an_array_is_received_where_it_is_wanted(make: Make) -> None:
    first, second = introduced(make)
    place = np.zeros(100_000, np.float32)
    wanted = Wanted("gather", 1, place=place)
    for number, (tag, size) in enumerate([("gather", 100_000), ("push", 100_000), ("gather", 99_999)], 1):
        sent = np.full(size, number, np.float32)
        thread = Thread(target=second.send, args=(0, Message(1, tag, sent, number=number)))
        thread.start()
        got = None
        while got is None:
            got = first.poll(0.01, (), wanted)
        thread.join()
        assert np.array_equal(got.payload, sent)
        assert (got.array is place) == (number == 1)
    assert (place == 1).all()


def test_an_array_that_is_wanted_as_a_matrix_arrives_on_its_own(make: Make) -> None:
    first, second = introduced(make)
    sent = np.arange(100_000, dtype=np.float32)
    thread = Thread(target=second.send, args=(0, Message(1, "gather", sent, number=1)))
    thread.start()
    got = None
    while got is None:
        got = first.poll(0.01, (), Wanted("gather", 1, place=np.zeros((1000, 100), np.float32)))
    thread.join()
    assert np.array_equal(got.payload, sent)


def test_nothing_is_written_where_a_program_wants_no_array_any_more(make: Make) -> None:
    """It was wanted when the message began to arrive; by its end the program waits for something else."""
    first, peer = as_peer(make)
    array, place = np.arange(60_000, dtype=np.float32), np.zeros(60_000, np.float32)
    data = framed(
        encode(Message(1, "gather", array, number=1), SenderIdentity("run", 1, "schema", 1 << 20)), array.tobytes()
    )
    with peer:
        peer.sendall(data[:200_000])
        while not place[40_000]:
            assert first.poll(0.01, (), Wanted("gather", 1, place=place)) is None
        place[:] = -1
        peer.sendall(data[200_000:])
        assert np.array_equal(arrived(first).payload, array)
    assert (place == -1).all()


UNDER_WAY = """
import subprocess, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
import test_streams
from flockstep.messages import Message, Wanted
from flockstep.transports import streams
from flockstep.transports.handshake import Handshake
from flockstep.transports.kinds import Tcp
from flockstep.transports.wire import SenderIdentity

subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
streams.UNANSWERED = 2
first, second = (streams.StreamBus(SenderIdentity("run", i, "schema", 1 << 20), "tcp://127.0.0.1:*") for i in (0, 1))
test_streams.join(first, second)
subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
second.send(0, Message(1, "push", np.ones(3), number=1))
while second.broken(0) != {0}:
    second.poll(0.1)
"""


@pytest.mark.skipif(not CAN_UNSHARE, reason="needs a network namespace of one's own (unshare -rn) and ip")
def test_a_link_that_goes_silent_is_noticed_while_something_is_under_way() -> None:
    """The system itself would give up after a quarter of an hour."""
    command = ["unshare", "-rn", sys.executable, "-c", UNDER_WAY, str(Path(__file__).parent)]
    assert subprocess.run(command, timeout=30, check=False).returncode == 0


@pytest.mark.parametrize("transport", SEALED)
def test_who_does_not_know_the_secret_is_refused(make: Make, transport: str) -> None:
    """A node of the same run, address and schema, but of another secret; then the real one."""
    first, forger, second = make(0, transport), make(1, transport, secret=b"another secret"), make(1, transport)
    first.connect({1: second.address})
    forger.connect({0: first.address})
    while not first.rejected or not forger.rejected:
        assert first.poll(0.01) is None
        assert forger.poll(0.01) is None
        assert not first.reachable(1)
    second.connect({0: first.address})
    while not (first.reachable(1) and second.reachable(0)):
        assert first.poll(0.01) is None
        assert second.poll(0.01) is None
    still_works(first, second)


@pytest.mark.parametrize("transport", SEALED)
@pytest.mark.parametrize("said", [b"", greeting(1), b"GET / HTTP/1.1\r\n\r\n" * 9, bytes(1 << 16)])
def test_a_stranger_with_the_right_greeting_does_not_disturb(make: Make, transport: str, said: bytes) -> None:
    first, second = make(0, transport), make(1, transport)
    strangers = [raw_connection(first, said) for _ in range(3)]
    join(first, second)
    while said and first.rejected < 3:
        assert first.poll(0.01) is None
    still_works(first, second)
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize("transport", SEALED)
def test_who_says_nothing_is_sent_away_after_some_time(
    make: Make, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = introduced(make, transport)
    stranger = raw_connection(first)
    while len(first._connections) < 2:
        first.poll(0.01)
    monkeypatch.setattr(streams, "PATIENCE", 0.0)
    while len(first._connections) > 1:
        first.poll(0)
    assert first.rejected == 1
    still_works(first, second)
    stranger.close()


@pytest.mark.parametrize("transport", ["tcp", *SEALED])
@pytest.mark.parametrize("listens", [False, True])
def test_a_peer_that_ends_before_it_greets_is_told_of(make: Make, transport: str, listens: bool) -> None:
    second = make(1, transport)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        if listens:
            second.connect({0: f"tcp://{host}:{port}"})
            assert second.broken(0) == set()
            listener.accept()[0].close()
    if not listens:
        second.connect({0: f"tcp://{host}:{port}"})
    while not second.broken(0):
        assert second.poll(0.01) is None
    assert second.broken(0) == {0}
    assert not second.reachable(0)


def test_what_was_decrypted_before_a_handler_raised_is_read_though_nothing_more_arrives(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "UNREAD", -1)  # the thread beside the program stays away
    first, second = introduced(make, "encrypted")
    for number in range(1, 6):
        second.send(0, Message(1, "push", number=number))

    def raises(connection: object) -> None:
        raise KeyboardInterrupt("asked to end")

    with monkeypatch.context() as patched:
        patched.setattr(first, "_drain", raises)
        with pytest.raises(KeyboardInterrupt, match="asked to end"):
            first.poll(1)
    assert [arrived(first).number for _ in range(5)] == [1, 2, 3, 4, 5]


def answered(peer: socket.socket, handshake: Handshake, bus: StreamBus) -> None:
    """Wait until the bus has answered the hello, which `peer` has sent."""
    peer.setblocking(False)
    data = b""
    while len(data) < handshake.due:
        bus.poll(0.01)
        with contextlib.suppress(BlockingIOError):
            data += peer.recv(handshake.due - len(data))
    handshake.feed(data)


def test_idle_strangers_are_closed_before_a_peer_in_its_handshake(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "STRANGERS", 3)
    first = make(0, "authenticated")
    handshake = Handshake(SECRET, connects=True, encrypts=False)
    with contextlib.ExitStack() as stack:
        peer = stack.enter_context(raw_connection(first, handshake.out))
        answered(peer, handshake, first)
        for _ in range(9):
            stack.enter_context(raw_connection(first))
        while first.rejected < 7:
            first.poll(0.01)
        peer.sendall(handshake.out)
        while not any(one.established() for one in first._connections.values()):
            first.poll(0.01)


def test_a_proof_that_waits_to_be_read_counts_though_its_time_is_over(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "TICK", 60.0)  # the thread beside the program stays away
    first = make(0, "authenticated")
    handshake = Handshake(SECRET, connects=True, encrypts=False)
    with raw_connection(first, handshake.out) as peer:
        answered(peer, handshake, first)
        peer.sendall(handshake.out)
        monkeypatch.setattr(streams, "PATIENCE", -1.0)
        first._end_silent(first._looked + 2)
        assert [one.established() for one in first._connections.values()] == [True]
        assert first.rejected == 0
