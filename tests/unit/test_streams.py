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
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

import flockstep.links.streams as streams
from flockstep.errors import CompositionError, ConfigurationError, PeerLost, ProtocolError
from flockstep.links import shared_memory
from flockstep.links.bus import Backlog
from flockstep.links.kinds import Tcp, Transport
from flockstep.links.shared_heap import PeerMemory
from flockstep.links.streams import BESIDE, StreamBus
from flockstep.links.wire import SenderIdentity, encode
from flockstep.messages import Message, Wanted
from flockstep.nodes import Cluster, Peer
from flockstep.runtime.messenger import Messenger
from flockstep.runtime.runner import Runner
from support.buses import (
    OVER_TCP,
    SECRET,
    Make,
    arrived,
    buses,
    framed,
    greeting,
    introduced,
    join,
    raw_connection,
    still_works,
)
from support.processes import PATIENCE

CAN_UNSHARE = bool(shutil.which("ip") and shutil.which("unshare")) and not subprocess.call(["unshare", "-rn", "true"])
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with buses(tmp_path) as made:
        yield made


@pytest.mark.parametrize("transport", [*OVER_TCP, "ipc", pytest.param("shared_memory", marks=LINUX)])
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


@pytest.mark.parametrize("transport", OVER_TCP)
def test_only_an_encrypted_connection_goes_through_more_than_the_socket(make: Make, transport: str) -> None:
    for bus in introduced(make, transport):
        (connection,) = bus._peers.values()
        assert isinstance(connection.socket, socket.socket) == (transport == "tcp")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems allow other sizes")
def test_the_system_chooses_the_buffers_of_a_tcp_connection_and_not_of_a_unix_socket(make: Make) -> None:
    for transport, family in (("tcp", socket.AF_INET), ("ipc", socket.AF_UNIX)):
        (connection,) = introduced(make, transport)[1]._peers.values()
        with socket.socket(family) as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, streams.LOCAL_BUFFER)
            largest = other.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        assert isinstance(connection.socket, socket.socket)
        size = connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        assert (size != largest) == (transport == "tcp")


@LINUX
def test_a_small_array_needs_no_slot_of_shared_memory(make: Make) -> None:
    first, second = introduced(make, "shared_memory")
    sizes = {streams.SMALLEST - 4: 0, streams.SMALLEST: 1}
    for number, (size, slots) in enumerate(sizes.items(), 1):
        first.send(1, Message(0, "push", np.ones(size // 4, np.float32), number=number))
        assert arrived(second).payload.sum() == size // 4
        assert first._heap is not None
        assert len(first._heap._numbered) == slots


@pytest.mark.parametrize("transport", OVER_TCP)
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


@pytest.mark.parametrize("transport", OVER_TCP)
def test_what_was_received_stays_as_long_as_somebody_holds_it(make: Make, transport: str) -> None:
    first, second = introduced(make, transport)
    held = []
    for number in range(1, 31):
        second.send(0, Message(1, "push", np.full(50_000, number, np.float32), number=number))
        held.append(arrived(first, second).payload)
    assert [int(array[0]) for array in held] == [int(array[-1]) for array in held] == list(range(1, 31))


@pytest.mark.parametrize("transport", OVER_TCP)
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


@pytest.mark.parametrize("transport", OVER_TCP)
def test_a_slow_peer_makes_its_sender_wait_and_misses_nothing(
    make: Make, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "QUEUED", 10)
    monkeypatch.setattr(streams, "UNREAD", -1)  # else the thread beside it takes in all
    first, second = introduced(make, transport)
    large = np.zeros(1 << 16, np.float32)
    sent = 0
    with pytest.raises(Backlog, match=r"worker 0 does not accept messages: [0-9]+ bytes wait for delivery"):  # noqa: PT012
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
        struct.pack("<IQQ", 5, 1 << 60, 0) + b"hello",
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        bytes(range(256)) * 8,
        framed(b"\x9f\x00\xa0\x00\x00\x00\xa0\xa0\x00\x00\x00\xa0\x00\x00\x00" + b"\x91" * 1008 + b"\x00"),
    ],
)
def test_who_does_not_belong_to_the_run_is_hung_up_on(said: bytes, make: Make) -> None:
    first, second = introduced(make, "ipc")
    with raw_connection(first, said) as stranger:
        while not first.traffic.rejected:
            assert first.poll(0.01) is None
        stranger.settimeout(PATIENCE)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    still_works(first, second)


def test_who_says_too_little_does_not_disturb(make: Make) -> None:
    first, second = introduced(make, "ipc")
    with raw_connection(first), raw_connection(first, b"\0" * 3) as half, raw_connection(first, greeting(1)[:20]):
        half.shutdown(socket.SHUT_WR)
        assert first.poll(0.01) is None
        still_works(first, second)
    assert first.traffic.rejected == 0


def test_a_stranger_cannot_take_the_name_of_a_peer_that_is_connected(make: Make) -> None:
    first, second = introduced(make, "ipc")
    with raw_connection(first, greeting(1), framed(b"garbage")):
        while not first.traffic.rejected:
            assert first.poll(0.01) is None
        still_works(first, second)


def test_who_speaks_before_it_was_let_in_is_hung_up_on(make: Make) -> None:
    """Nobody knows yet who takes part; who has greeted has to wait for an answer."""
    first, second = make(0, "ipc"), make(1, "ipc")
    push = encode(Message(1, "push", number=1), SenderIdentity("run", 1, "schema", 1 << 20))
    with raw_connection(first, greeting(1), framed(push)):
        while not first.traffic.rejected:
            assert first.poll(0.01) is None
        join(first, second)
        still_works(first, second)


def as_peer(make: Make) -> tuple[StreamBus, socket.socket]:
    """A bus, and a bare socket that it takes for worker 1."""
    first = make(0, "ipc")
    first.connect({1: "ipc://nowhere"})
    peer = raw_connection(first, greeting(1))
    while not first.reachable(1):
        assert first.poll(0.01) is None
    return first, peer


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (framed(b"garbage"), "worker 1 sent a header that does not follow protocol"),
        (struct.pack("<IQQ", 1 << 20, 0, 0), "worker 1 announced a header of 1048576 bytes"),
        (
            struct.pack("<IQQ", 5 | 1 << 31, 1 << 40, 0),
            "and a payload of 1099511627776 bytes, but the model has only 1048576 bytes",
        ),
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


@pytest.mark.parametrize("host", ["127.0.0.2", "::1", "localhost"])
def test_a_host_is_an_address_of_either_kind_or_a_name(make: Make, host: str) -> None:
    first, second = introduced(make, f"tcp(host={host!r})")
    still_works(first, second)
    assert first.address.startswith("tcp://[::1]:" if host == "::1" else "tcp://1" if host[0] == "1" else "tcp://")


@pytest.mark.parametrize("host", ["", "no such host", "nowhere.invalid", "1.2.3.4.5", "*", "0.0.0.0/0", "x" * 300])
def test_a_name_that_does_not_resolve_is_refused(make: Make, host: str) -> None:
    with pytest.raises(ConfigurationError, match=r"host '.*' does not resolve: .*; use an address of this machine"):
        make(0, f"tcp(host={host!r})")


def test_a_name_is_resolved_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def resolver(host: object, *_: object, **__: object) -> list[tuple[object, ...]]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.7", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    transport = Tcp("node0.example")
    assert transport.encrypts
    assert [transport.listen(Path(), ""), transport.listen(Path(), "")] == ["tcp://192.0.2.7:*"] * 2
    assert asked == ["node0.example"]


@pytest.mark.parametrize(("host", "why"), [("0.0.0.0", "every interface"), ("::", "every"), ("fe80::1", "one link")])
def test_an_address_that_peers_cannot_connect_to_is_refused(host: str, why: str) -> None:
    with pytest.raises(
        ConfigurationError, match=f"host must be .* to which other nodes can connect, got {host}, .*{why}"
    ):
        Tcp(host)


@pytest.mark.skipif(sys.platform != "linux", reason="the addresses of interfaces are asked of Linux")
def test_an_interface_stands_for_its_address(make: Make) -> None:
    assert not Tcp(interface="lo").encrypts
    first, second = introduced(make, "tcp(interface=lo)")
    assert first.address.startswith("tcp://127.0.0.1:")
    still_works(first, second)
    with pytest.raises(
        ConfigurationError, match=r"interface must be one of the interfaces of this machine, .*lo.*, got 'lo7'"
    ):
        make(0, "tcp(interface=lo7)")
    with pytest.raises(
        ConfigurationError, match="give either host or interface, got both host='::1' and interface='lo'"
    ):
        Tcp("::1", interface="lo")


INTERFACES = """
import subprocess, sys
from flockstep.errors import ConfigurationError
from flockstep.links.addresses import interface_address

def ip(*words):
    subprocess.run(["ip", *words], check=True)

ip("link", "add", "fs6", "type", "veth", "peer", "fs7")
ip("link", "set", "fs6", "up")
try:
    sys.exit(f"found {interface_address('fs6')}")
except ConfigurationError as error:
    assert str(error) == "interface fs6 has no address to which other nodes can connect; use host=ADDRESS", error
ip("-6", "addr", "add", "fd00:7::1/64", "dev", "fs6", "nodad")
assert interface_address("fs6") == "fd00:7::1"
ip("addr", "add", "10.7.0.1/24", "dev", "fs6")
assert interface_address("fs6") == "10.7.0.1"
"""


@pytest.mark.skipif(not CAN_UNSHARE, reason="needs a network namespace of one's own (unshare -rn) and ip")
def test_an_interface_gives_its_ipv4_address_else_its_ipv6_address() -> None:
    done = subprocess.run(["unshare", "-rn", sys.executable, "-c", INTERFACES], stderr=subprocess.PIPE, check=False)
    if b"Unknown device type" in done.stderr:
        pytest.skip("this machine makes no interfaces")
    assert done.returncode == 0, done.stderr.decode()


def test_each_node_takes_a_free_port_of_the_range(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        low = min(taken.getsockname()[1], 65533)
        transport = f"tcp(ports='{low}-{low + 2}')"
        first, second = introduced(make, transport)
        still_works(first, second)
        ports = {int(bus.address.rpartition(":")[2]) for bus in (first, second)}
        assert ports <= {low, low + 1, low + 2} - {taken.getsockname()[1]}
        assert len(ports) == 2
        with pytest.raises(ConfigurationError, match=rf"127\.0\.0\.1:{low}-{low + 2}: no free port is left"):
            make(2, transport)


@pytest.mark.parametrize("ports", [0, "0", "2-1", "0-5", "1-65536", "70000", "a", "1-", "-5", "1-2-3", "1.5"])
def test_ports_that_are_no_range_are_refused(ports: str | int) -> None:
    with pytest.raises(ConfigurationError, match=f"ports must be a port or a range .*, got '{ports}'; write them like"):
        Tcp(ports=ports)


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1"])
def test_tcp_without_a_secret_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"worker 3 cannot listen on tcp://.* without a secret, because any user"
    ):
        Tcp(host).bus(SenderIdentity("run", 3, "schema", 1 << 20), tmp_path, "")


def test_a_host_of_another_machine_is_refused(make: Make) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot listen on tcp://192\.0\.2\.1:\*: .*; use an address of this"):
        make(0, "tcp(host='192.0.2.1')")  # of a network kept for documentation


def test_an_address_in_use_is_refused(make: Make) -> None:
    with pytest.raises(ConfigurationError, match="no free port is left; give a range with a port for each node"):
        StreamBus(SenderIdentity("run", 1, "schema", 40, secret=SECRET), make(0).address)


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
    monkeypatch.setattr(shared_memory, "host_here", lambda: "another")
    join(first, second)
    assert not first._me.peer_memory
    assert not second._me.peer_memory
    second.send(0, Message(1, "push", np.arange(50_000, dtype=np.float32), number=1))
    assert arrived(first).payload[-1] == 49_999


@LINUX
def test_memory_that_is_not_the_peers_is_noticed(make: Make) -> None:
    location = make(0, "tcp(memory=true)").address.partition(BESIDE)[2]
    assert PeerMemory(location, 1) is not None
    with pytest.raises(CompositionError, match="has an unexpected layout"):
        PeerMemory("00" * 16 + location[32:], 1)


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
    with pytest.raises(Backlog, match="worker 0 does not accept messages"):  # noqa: PT012
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

    def __init__(self, inner: Any, method: str, partly: int = 0, error: Exception | None = None):
        self.inner, self.method, self.partly = inner, method, partly
        self.error = error or Interrupted("in the middle")

    def __getattr__(self, name: str) -> Any:
        def interrupted(*arguments: Any) -> Any:
            self.method = ""
            if self.partly:
                self.inner.sendmsg([arguments[0][0][: self.partly]])
            raise self.error

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


def test_an_array_is_received_where_it_is_wanted(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "UNREAD", -1)  # the thread beside the program takes in nothing
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
from support.buses import join
from flockstep.messages import Message, Wanted
from flockstep.links import streams
from flockstep.links.handshake import Handshake
from flockstep.links.kinds import Tcp
from flockstep.links.wire import SenderIdentity

subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
first, second = (
    streams.StreamBus(
        SenderIdentity("run", i, "schema", 1 << 20, secret=b"secret"), "tcp://127.0.0.1:*", False, False, 1.0, 2.0, True
    )
    for i in (0, 1)
)
join(first, second)
subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
if sys.argv[2] == "sends":
    second.send(0, Message(1, "push", np.ones(3), number=1))
while second.broken(0) != {0}:
    assert second.poll(None) is None
assert "longer than the link timeout of 2 s" in second.why_broken(0), second.why_broken(0)
"""


@pytest.mark.skipif(not CAN_UNSHARE, reason="needs a network namespace of one's own (unshare -rn) and ip")
@pytest.mark.parametrize("what", ["sends", "is idle"])
def test_a_link_that_goes_silent_is_noticed(what: str) -> None:
    """The system itself would give up after a quarter of an hour, or never."""
    command = ["unshare", "-rn", sys.executable, "-c", UNDER_WAY, str(Path(__file__).parents[1]), what]
    assert subprocess.run(command, timeout=PATIENCE, check=False).returncode == 0


@pytest.mark.parametrize("transport", OVER_TCP)
@pytest.mark.parametrize("listens", [False, True])
def test_a_peer_whose_connections_all_end_before_it_greets_is_told_of(
    make: Make, transport: str, listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "FIRST_WAIT", 0.0)
    second = make(1, transport)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        if listens:
            second.connect({0: f"tcp://{host}:{port}"})
            for _ in range(1 + streams.REDIALS):
                assert second.broken(0) == set()
                listener.accept()[0].close()
    if not listens:
        second.connect({0: f"tcp://{host}:{port}"})
    while not second.broken(0):
        assert second.poll(0.01) is None
    assert second.broken(0) == {0}
    assert not second.reachable(0)


@pytest.mark.parametrize("transport", OVER_TCP)
def test_a_peer_that_was_turned_away_among_strangers_connects_again(make: Make, transport: str) -> None:
    first, second = make(0, transport), make(1, transport)
    with socket.create_server(("127.0.0.1", 0)) as crowded:
        second.connect({0: "tcp://{}:{}".format(*crowded.getsockname())})
        crowded.accept()[0].close()
        second._dials[0].address = first.address
    first.connect({1: second.address})
    while not (first.reachable(1) and second.reachable(0)):
        assert first.poll(0.01) is None
        assert second.poll(0.01) is None
    assert second.broken(0) == set()
    still_works(first, second)


def test_a_peer_that_was_lost_is_not_connected_to_again(make: Make) -> None:
    second = make(1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        second.connect({0: "tcp://{}:{}".format(*listener.getsockname())})
        second.disconnect(0)
        listener.accept()[0].close()
        while second.broken(0) != {0}:
            assert second.poll(0.01) is None


@pytest.mark.parametrize("transport", [*OVER_TCP, "ipc"])
@pytest.mark.parametrize("method", ["recv_into", "sendmsg"])
def test_a_timeout_that_a_handler_raises_is_not_taken_for_one_of_the_socket(
    make: Make, transport: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TimeoutError is an OSError, as a broken connection is."""
    monkeypatch.setattr(streams, "UNREAD", -1)  # the thread beside the program stays away
    first, second = introduced(make, transport)
    connection: Any = first._peers[1]

    second.send(0, Message(1, "push", np.ones(3), number=1))
    monkeypatch.setattr(
        connection, "socket", Interrupting(connection.socket, method, error=TimeoutError("the step took too long"))
    )
    with pytest.raises(TimeoutError, match="the step took too long"):  # noqa: PT012
        first.poll(10)
        first.send(1, Message(0, "pull", number=1))
    assert first.broken(0) == {1}


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
