"""Sessions: whatever happens to the connections, every message is handed up exactly once and in order."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flockstep.errors import ProtocolError
from flockstep.links.connection import LinkSession
from flockstep.links.streams import _LEAVES, StreamBus
from flockstep.messages import Message
from flockstep_lab.link_faults import FaultProxy
from support.buses import Make, arrived, buses, introduced, join, still_works
from support.matrix import few


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with buses(tmp_path) as made:
        yield made


class End:
    """One end of a session over connections that carry bytes as far as a test lets them."""

    def __init__(self) -> None:
        self.session = LinkSession("key")
        self.out: deque[memoryview] = deque()
        self.got = b""

    def write(self, data: bytearray) -> None:
        """Send bytes whose memory is reused afterwards."""
        self.out.append(memoryview(data))

    def carry(self, count: int, to: End, arrive: int) -> None:
        """Write at most `count` bytes to the connection, of which `arrive` arrive before the connection breaks."""
        while count and self.out:
            part = self.out.popleft()
            now, rest = part[:count], part[count:]
            if rest.nbytes:
                self.out.appendleft(rest)
            self.session.keep(now)
            count -= now.nbytes
            there = bytes(now[:arrive])
            to.got += there
            to.session.received += len(there)
            arrive -= len(there)

    def reconnect(self, to: End) -> None:
        """Go on from what has arrived at the other end."""
        self.out.extendleft(reversed(self.session.rewind(to.session.received)))


STEPS = st.lists(
    st.tuples(st.binary(max_size=40), st.integers(0, 60), st.integers(0, 60), st.booleans()), min_size=1, max_size=25
)


@given(STEPS)
def test_bytes_arrive_once_and_in_order_wherever_the_connection_breaks(
    steps: list[tuple[bytes, int, int, bool]],
) -> None:
    one, other = End(), End()
    expected = b""
    for data, count, lost, acknowledged in steps:
        expected += data
        mutable = bytearray(data)
        one.write(mutable)
        one.carry(count, other, count - lost if lost < count else count)
        if lost < count:
            one.reconnect(other)
        elif acknowledged:
            one.session.acknowledge(other.session.received)
            assert one.session.unacknowledged == 0
        assert other.got == expected[: len(other.got)]
        assert sum(part.nbytes for part in one.session._kept) == one.session.unacknowledged
    one.carry(1 << 20, other, 1 << 20)
    assert other.got == expected


@given(st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=8), st.data())
def test_memory_that_changes_after_it_was_sent_is_replaced_by_a_copy(parts: list[bytes], data: st.DataObject) -> None:
    one, other = End(), End()
    mutable = [bytearray(part) for part in parts]
    for part in mutable:
        one.write(part)
    one.carry(1 << 20, other, 0)
    whole = b"".join(parts)
    end = data.draw(st.integers(0, len(whole)))
    one.session.replace_end(memoryview(whole[len(whole) - end :]))
    at = 0
    for part in mutable:
        for i in range(len(part)):
            if at >= len(whole) - end:
                part[i] ^= 0xFF
            at += 1
    one.reconnect(other)
    one.carry(1 << 20, other, 1 << 20)
    assert other.got == whole


def test_numbers_that_are_impossible_are_refused() -> None:
    session = LinkSession("key")
    session.keep(memoryview(bytes(10)))
    with pytest.raises(ProtocolError, match="acknowledges 11 bytes, but only 10 bytes were sent"):
        session.acknowledge(11)
    session.acknowledge(4)
    session.acknowledge(3)  # arrived late
    assert session.unacknowledged == 6
    with pytest.raises(ProtocolError, match="3 bytes have arrived, but it has already acknowledged 4 bytes"):
        session.rewind(3)


@contextlib.contextmanager
def proxied(
    make: Make, transport: str, faults: tuple[str, ...], seed: int, every: int, most: int
) -> Iterator[tuple[StreamBus, StreamBus, FaultProxy]]:
    """Two buses, of which the second connects to the first through a proxy."""
    first, second = make(0, transport, sessions=True), make(1, transport, sessions=True)
    for bus in (first, second):
        bus._heartbeat = 1.0
    host, _, port = first.address.removeprefix("tcp://").rpartition(":")
    proxy = FaultProxy((host, int(port)), faults, seed, every, most)
    try:
        first.connect({1: second.address})
        second.connect({0: f"tcp://127.0.0.1:{proxy.address[1]}"})
        while not (first.reachable(1) and second.reachable(0)):
            assert first.poll(0.01) is None
            assert second.poll(0.01) is None
        yield first, second, proxy
    finally:
        proxy.close()


CASES = [
    *((fault, "tcp") for fault in ("cut", "close", "half_open", "late", "delay", "outage")),
    *((fault, "encrypted") for fault in ("cut", "half_open", "late", "corrupt", "drop", "repeat", "reorder")),
]


@pytest.mark.parametrize(
    ("fault", "transport"), few(CASES, ("cut", "tcp"), ("half_open", "tcp"), ("late", "tcp"), ("corrupt", "encrypted"))
)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.full)])
def test_messages_arrive_once_and_in_order_over_a_faulty_link(
    make: Make, fault: str, transport: str, seed: int
) -> None:
    """The sender changes an array as soon as it was sent; messages go both ways, of all sizes."""
    sizes = np.random.default_rng(seed).choice([0, 1, 100, 5_000, 20_000, 120_000], 60)
    most = 1 if fault in ("half_open", "outage") else 6
    with proxied(make, transport, (fault,), seed, 400_000, most) as (first, second, proxy):
        for number, size in enumerate(map(int, sizes), 1):
            for bus, to in ((first, 1), (second, 0)):
                array = np.full(size, number, np.float32)
                bus.send(to, Message(1 - to, "push", array, number=number))
                array[:] = -1
            for bus, other in ((first, second), (second, first)):
                got = arrived_anyhow(bus, other, number)
                assert got.payload.size == size
                assert (got.payload == number).all()
        assert first.poll(0) is None
        assert second.poll(0) is None
        assert proxy.fired[fault] > 0
        if fault != "delay":
            assert second.traffic.resumed >= 1
            assert first.traffic.resumed >= 1
        if transport == "encrypted" and fault in ("corrupt", "repeat", "reorder"):
            assert first.traffic.corrupted + second.traffic.corrupted > 0


def arrived_anyhow(bus: StreamBus, other: StreamBus, number: int) -> Message:
    """Message `number`; the other bus keeps what arrives for it meanwhile."""
    while (message := bus.poll(0.01)) is None:
        other.attend()
    assert message.number == number
    return message


def test_a_session_goes_on_after_an_answer_that_was_changed_in_transit(make: Make) -> None:
    """The handshake of the connection that is to go on with the session is damaged once."""
    with (
        proxied(make, "encrypted", (), 1, 1, 0) as (first, second, proxy),
        socket.create_server(("127.0.0.1", 0)) as wrong,
    ):
        second._peers[0].where = f"tcp://127.0.0.1:{wrong.getsockname()[1]}"
        second._interrupt(second._peers[0], "the test cuts the link")
        second.attend()
        connection, _ = wrong.accept()
        with connection:
            connection.sendall(b"\xff" * 1000)
            while not (second.traffic.corrupted or second.traffic.rejected):
                second.attend()
        assert not second.broken(0)
        second._dials[0].address = f"tcp://127.0.0.1:{proxy.address[1]}"
        while not second.traffic.resumed:
            second.attend()
            first.attend()
        still_works(first, second)


def test_a_session_waits_for_a_link_that_is_away_and_bounds_what_it_keeps(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flockstep.links.streams.AHEAD", 1 << 20)
    with proxied(make, "tcp", ("cut",), 1, 1, 0) as (first, second, proxy):
        proxy.down.set()
        first._interrupt(first._peers[1], "the test cuts the link")
        sent = 0
        with contextlib.suppress(Exception):
            while True:
                second.send(0, Message(1, "push", np.full(20_000, sent + 1, np.float32), number=sent + 1))
                sent += 1
        assert 13 <= sent <= 14  # of 80,000 bytes each: at most one more than fits
        proxy.down.clear()
        for number in range(1, sent + 1):
            got = arrived(first)
            assert got.number == number
            assert (got.payload == number).all()


def test_a_peer_whose_port_is_closed_is_unreachable_at_once(make: Make) -> None:
    """A process that was killed says nothing: its connection ends, and nothing listens at its address."""
    with proxied(make, "tcp", ("cut",), 1, 1, 0) as (first, second, proxy):
        proxy.close()
        while not second.broken(0):
            assert second.poll(0.01) is None
        assert "nothing listens at tcp://127.0.0.1" in second.why_broken(0)
        assert not second.reachable(0)
        assert first.reachable(1)  # it may be connected to again within the link timeout


@pytest.mark.parametrize("transport", ["tcp", pytest.param("encrypted", marks=pytest.mark.full)])
def test_a_silent_connection_without_a_session_lasts(make: Make, transport: str) -> None:
    """Within a host a connection breaks only if a process ends."""
    first, second = introduced(make, transport)
    for bus in (first, second):
        bus._heartbeat, bus._next_look = 0.05, 0.0
    until = time.monotonic() + 6 * 0.05
    while time.monotonic() < until:
        for bus in (first, second):
            assert bus.poll(0.01) is None
    assert second.reachable(0)
    still_works(first, second)


def test_a_link_that_breaks_again_and_again_does_not_delay_the_detection_of_a_silent_one(make: Make) -> None:
    """Every break lets the bus look at its links at once, which must not count as if the process had looked late."""
    first, second, third = (make(address, sessions=True) for address in range(3))
    everyone = {bus._me.address: bus.address for bus in (first, second, third)}
    for bus in (first, second, third):
        bus.connect({peer: where for peer, where in everyone.items() if peer != bus._me.address})
    while not (third.reachable(0) and third.reachable(1)):
        for bus in (first, second, third):
            bus.poll(0.01)
    silent = third._peers[0]
    assert silent.session is not None
    with third._lock:
        heard = time.monotonic() - third._heartbeat / 2
        silent.checked = heard, silent.session.received, silent.session.sent + silent.waiting
        third._next_look = time.monotonic() + third._heartbeat / 4
        third._interrupt(third._peers[1], "the test cuts the link")
        third._look(time.monotonic())
        assert silent.checked[0] == heard


def test_a_closed_bus_opens_no_connection(make: Make) -> None:
    """The thread that serves the sockets may come too late, while the bus still tries to connect to its peer again."""
    with proxied(make, "tcp", ("cut",), 1, 1, 0) as (_, second, proxy):
        proxy.down.set()
        second._interrupt(second._peers[0], "the test cuts the link")
        second.close(0)
        count, second._dials[0].due, second._next_look = second._dials[0].count, 0.0, 0.0
        assert not second.attend()
        assert second._dials[0].count == count


def test_a_link_that_stays_away_too_long_is_given_up_with_the_true_numbers(make: Make) -> None:
    with proxied(make, "tcp", ("cut",), 1, 1, 0) as (first, second, proxy):
        proxy.down.set()
        for bus in (first, second):
            bus._link_timeout = 0.5
        for bus, peer in ((first, 1), (second, 0)):
            while not bus.broken(0):
                assert bus.poll(0.01) is None
            why = bus.why_broken(peer)
            assert "nothing arrived for" in why
            assert "longer than the link timeout of 0.5 s" in why


def test_a_session_is_taken_over_only_by_its_key(make: Make) -> None:
    """A process that knows the secret of the run, but not the key of the session, is turned away."""
    first, second = make(0, sessions=True), make(1, sessions=True)
    first.connect({1: second.address})
    second.connect({0: first.address})
    while not (first.reachable(1) and second.reachable(0)):
        first.poll(0.01)
        second.poll(0.01)
    intruder = make(1, sessions=True)
    intruder.connect({0: first.address})
    while not first.traffic.rejected:
        first.poll(0.01)
        intruder.poll(0.01)
    second.send(0, Message(1, "push", number=1))
    assert arrived(first).number == 1
    assert first.traffic.resumed == 0


def test_a_message_stays_whole_if_its_receiver_leaves_while_it_is_written(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing may be queued between the parts of a message, of which the last part is copied when it has to wait."""
    first, second = make(0, sessions=True), make(1, sessions=True)
    join(first, second)
    for bus in (first, second):
        monkeypatch.setattr(bus, "attend", lambda bus=bus: not bus._closed)
    array, count = np.arange(200_000, dtype=np.float32), 0
    while not first.waiting(1):
        count += 1
        first.send(1, Message(0, "push", array, number=count))
    connection = second._peers[0]
    assert connection.session is not None
    with second._lock:
        second._acknowledge(connection, _LEAVES)
        last = connection.session.sent + connection.waiting
    first.send(1, Message(0, "push", -array, number=count + 1))
    assert first._peers[1].left, "the word arrived while the message was written"
    for number in range(1, count + 2):
        got = arrived(second, first)
        assert got.number == number
        assert (got.payload == (array if number <= count else -array)).all()
    while connection.session.acknowledged < last:
        assert first.poll(0.01) is None
        assert second.poll(0.01) is None
