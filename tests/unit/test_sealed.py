"""Connections that are authenticated and encrypted: a stranger gets in nowhere, and a changed byte is noticed."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import socket
from collections.abc import Iterator

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from flockstep.errors import ProtocolError
from flockstep.links.handshake import HELLO, PLAIN, PROOF, Handshake
from flockstep.links.sealed import RECORD, LinkForged, SealedSocket

SECRET = b"0123456789abcdef" * 2
_open: list[socket.socket] = []


@pytest.fixture(autouse=True)
def _closing() -> Iterator[None]:
    yield
    while _open:
        _open.pop().close()


def connected() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets, closed after the test."""
    ends = socket.socketpair()
    _open.extend(ends)
    return ends


def pair(encrypts: bool = True, secrets: tuple[bytes, bytes] = (SECRET, SECRET)) -> tuple[SealedSocket, SealedSocket]:
    """The end that connects and the other one; nothing has been sent."""
    ends = connected()
    for end in ends:
        end.setblocking(False)
    one, other = (SealedSocket(end, key, end is ends[0], encrypts) for end, key in zip(ends, secrets, strict=True))
    one.flush()
    return one, other


def shaken(encrypts: bool = True) -> tuple[SealedSocket, SealedSocket]:
    one, other = pair(encrypts)
    for end in itertools.islice(itertools.cycle((other, one)), 4):
        with pytest.raises(BlockingIOError):
            end.recv_into(memoryview(bytearray(1)))
    assert one.established
    assert other.established
    return one, other


def moved(sender: SealedSocket, receiver: SealedSocket, parts: list[bytes], rooms: list[int]) -> bytes:
    """Send all parts and receive them in rooms of those sizes, in turn."""
    left, got, total = [memoryview(part) for part in parts if part], bytearray(), sum(map(len, parts))
    sizes = itertools.cycle(rooms)
    while len(got) < total:
        try:
            sent = sender.sendmsg(left[:2]) if left else 0
            while left and sent >= left[0].nbytes:
                sent -= left.pop(0).nbytes
            if sent:
                left[0] = left[0][sent:]
        except BlockingIOError:
            pass
        room = bytearray(next(sizes))
        try:
            count = receiver.recv_into(memoryview(room))
        except BlockingIOError:
            sender.flush()
            continue
        assert count
        got += room[:count]
    return bytes(got)


@pytest.mark.parametrize("encrypts", [False, True])
@given(parts=st.lists(st.integers(0, 3 * RECORD), max_size=5), rooms=st.lists(st.integers(1, 2 * RECORD), min_size=1))
def test_bytes_arrive_as_they_were_sent(encrypts: bool, parts: list[int], rooms: list[int]) -> None:
    one, other = shaken(encrypts)
    data = [np.random.default_rng(size).bytes(size) for size in parts]
    least = [max(room, 1 + sum(parts) // 300) for room in rooms]
    assert moved(one, other, data, least) == b"".join(data)
    assert moved(other, one, data[::-1], least) == b"".join(data[::-1])
    for end in (one, other):
        assert not end.unread
        assert not end.blocked
        end.close()


@pytest.mark.parametrize("encrypts", [False, True])
@pytest.mark.parametrize("wrong", [0, 1])
def test_an_end_without_the_secret_is_refused_by_the_other(encrypts: bool, wrong: int) -> None:
    keys = [SECRET, SECRET]
    keys[wrong] = b"another secret of 32 bytes, wron"
    one, other = pair(encrypts, (keys[0], keys[1]))
    room = memoryview(bytearray(8))
    for end in (other, one):
        with pytest.raises(BlockingIOError):
            end.recv_into(room)
    for end in (other, one):
        with pytest.raises(LinkForged, match="does not know the secret"):
            end.recv_into(room)
    for end in (one, other):
        assert not end.established
        with pytest.raises(BlockingIOError):
            end.sendmsg([room])


def test_the_end_that_connects_wants_a_proof_too() -> None:
    """Its own proof, sent back, is none."""
    connecting = Handshake(SECRET, connects=True, encrypts=False)
    connecting.feed(PLAIN + bytes(32))
    for forged in (bytes(PROOF), connecting.out):
        with pytest.raises(ProtocolError, match="does not know the secret"):
            connecting.feed(forged)
    assert connecting.due


def test_the_proof_is_what_the_description_says() -> None:
    """Written from the module's description alone: HMAC under HMAC(secret, SHA-256(hellos and purpose))."""
    accepting = Handshake(SECRET, connects=False, encrypts=False, purpose="run worker 0")
    hello = PLAIN + bytes(range(32))
    accepting.feed(hello)
    key = hmac.digest(SECRET, hashlib.sha256(hello + accepting.out + b"run worker 0").digest(), "sha256")
    accepting.feed(hmac.digest(key, b"proof of the end that connects", "sha256"))
    assert accepting.out == hmac.digest(key, b"proof of the other end", "sha256")
    assert accepting.due == 0


def test_a_recorded_session_cannot_be_replayed() -> None:
    one, other = Handshake(SECRET, True, True), Handshake(SECRET, False, True)
    hello = one.out
    other.feed(hello)
    one.feed(other.out)
    proof = one.out
    other.feed(proof)
    one.feed(other.out)
    assert (one.due, other.due) == (0, 0)
    again = Handshake(SECRET, False, True)
    again.feed(hello)
    with pytest.raises(ProtocolError, match="does not know the secret"):
        again.feed(proof)


def test_keys_differ_by_direction_and_session() -> None:
    found = set()
    for _ in range(2):
        one, other = Handshake(SECRET, True, True), Handshake(SECRET, False, True)
        other.feed(one.out)
        one.feed(other.out)
        here, there = one.keys(), other.keys()
        assert here is not None
        assert there is not None
        assert (here.sending, here.receiving) == (there.receiving, there.sending)
        found |= {here.sending, here.receiving}
    assert len(found) == 4


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\n", bytes(64), PLAIN + bytes(60), b"\0", PLAIN[:-2] + b"1"])
def test_another_protocol_is_refused_after_its_first_bytes(words: bytes) -> None:
    """An end that encrypts refuses one that does not, too."""
    near, far = connected()
    near.setblocking(False)
    accepting = SealedSocket(near, SECRET, connects=False, encrypts=True)
    far.sendall(words)
    with pytest.raises(LinkForged, match="began with"):
        accepting.recv_into(memoryview(bytearray(8)))


def test_a_bad_public_key_is_refused() -> None:
    accepting = Handshake(SECRET, connects=False, encrypts=True)
    with pytest.raises(ProtocolError, match="bad public key"):
        accepting.feed(Handshake(SECRET, True, True).out[: HELLO - 32] + bytes(32))


class Wire:
    """What an attacker on the way sees of records that one end sends, and how the other end takes what is given on."""

    def __init__(self) -> None:
        near, self.to_far = connected()
        far, self.to_near = connected()
        for end in (near, far, self.to_far, self.to_near):
            end.setblocking(False)
        self.one, self.other = SealedSocket(near, SECRET, True, True), SealedSocket(far, SECRET, False, True)
        self.one.flush()
        for end, way in ((self.other, 0), (self.one, 1), (self.other, 0), (self.one, 1)):
            self.hand_on(way)
            with pytest.raises(BlockingIOError):
                end.recv_into(memoryview(bytearray(1)))
        assert self.other.established

    def hand_on(self, way: int) -> None:
        """All that has arrived at one side of the attacker goes to the other side."""
        source, target = ((self.to_far, self.to_near), (self.to_near, self.to_far))[way]
        with contextlib.suppress(BlockingIOError):
            target.sendall(source.recv(1 << 20))

    def record(self, plain: bytes) -> bytes:
        assert self.one.sendmsg([memoryview(plain)]) == len(plain)
        return self.to_far.recv(1 << 20)

    def received(self, data: bytes) -> bytes:
        self.to_near.sendall(data)
        room = bytearray(1 << 16)
        return bytes(room[: self.other.recv_into(memoryview(room))])


def test_what_is_on_the_wire_is_not_what_was_sent() -> None:
    wire = Wire()
    plain = b"the gradient of worker 1, which nobody else may read"
    record = wire.record(plain)
    assert plain[:8] not in record
    assert len(record) == 4 + len(plain) + 16
    assert wire.received(record) == plain


@given(st.data())
def test_any_changed_byte_ends_the_connection(data: st.DataObject) -> None:
    wire = Wire()
    record = bytearray(wire.record(bytes(data.draw(st.integers(1, 2000)))))
    at = data.draw(st.integers(0, len(record) - 1))
    record[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises((LinkForged, BlockingIOError)) as raised:
        wire.received(bytes(record))
    assert at < 4 or raised.type is LinkForged  # of a record that has become longer the rest is awaited


def test_nothing_of_a_changed_record_is_returned_later() -> None:
    """A record that is longer than the room is decrypted elsewhere first."""
    wire = Wire()
    record = bytearray(wire.record(bytes(100)))
    record[-1] ^= 1
    wire.to_near.sendall(record + wire.record(bytes(100)))
    for _ in range(2):
        with pytest.raises(LinkForged, match="changed, dropped or repeated"):
            wire.other.recv_into(memoryview(bytearray(10)))


@pytest.mark.parametrize("order", [(1,), (0, 0), (1, 0), (0, 2)])
def test_a_record_that_is_dropped_repeated_or_moved_ends_the_connection(order: tuple[int, ...]) -> None:
    wire = Wire()
    records = [wire.record(bytes([number]) * 9) for number in range(3)]
    for number in order[:-1]:
        if order[0] == 0:
            assert wire.received(records[number]) == bytes([number]) * 9
    with pytest.raises(LinkForged, match="changed, dropped or repeated"):
        wire.received(records[order[-1]] if order[0] == 0 else records[order[0]])


def test_an_announced_length_allocates_nothing() -> None:
    wire = Wire()
    for size in (0, RECORD + 1, 2**32 - 1):
        wire = Wire()
        with pytest.raises(LinkForged, match=f"a record of {size} bytes was announced"):
            wire.received(size.to_bytes(4, "little") + bytes(30))


def test_records_are_aes_gcm_with_counted_nonces() -> None:
    """Opened by the library itself, from the keys of the handshake."""
    one, other = Handshake(SECRET, True, True), Handshake(SECRET, False, True)
    other.feed(one.out)
    one.feed(other.out)
    from flockstep.links.sealed import _Sealer

    keys = one.keys()
    assert keys is not None
    sealer = _Sealer(keys.sending)
    for count, plain in enumerate([b"a", b"bc"]):
        record = bytes(sealer.seal(memoryview(plain)))
        there = other.keys()
        assert there is not None
        opened = AESGCM(there.receiving).decrypt(count.to_bytes(12, "little"), record[4:], record[:4])
        assert opened == plain
