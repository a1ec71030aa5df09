"""A stream socket that is authenticated with the secret of the run and, on request, encrypted.

After the handshake an encrypted link carries records: a length, and at most `RECORD` bytes under AES-256-GCM with a tag
of 16 bytes. Each direction has its own key, and the nonce counts the records. If a record was changed, dropped,
repeated or moved, the connection ends.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence

from flockstep.errors import ProtocolError
from flockstep.links.handshake import Handshake

RECORD = 1 << 18
"""Largest number of bytes of one record before encryption."""
_LENGTH = struct.Struct("<I")
_TAG = 16
_NONCE = 12


class LinkForged(OSError):
    """Raised if the other end of a connection does not know the run's secret, or if bytes were changed in transit."""


class SealedSocket:
    """A connected non-blocking stream socket, authenticated with a secret and, with `encrypts`, encrypted.

    `recv_into` and `sendmsg` raise `BlockingIOError` until both ends have proved that they know the secret, and
    `LinkForged`, an `OSError`, if the other end cannot prove it, or if a record was changed. Other methods are those of
    `socket`.
    """

    def __init__(self, sock: socket.socket, secret: bytes, connects: bool, encrypts: bool, purpose: str = ""):
        """`connects`: this end has opened the connection; `purpose`: text on which both ends must agree."""
        self.family = sock.family
        self.fileno, self.getsockopt, self.shutdown, self.close = (
            sock.fileno,
            sock.getsockopt,
            sock.shutdown,
            sock.close,
        )
        self._socket = sock
        self._handshake: Handshake | None = Handshake(secret, connects, encrypts, purpose)
        self._arrived = bytearray()
        self._unsent = memoryview(self._handshake.out)
        self._sealer: _Sealer | None = None
        self._opener: _Opener | None = None

    @property
    def established(self) -> bool:
        """Whether both ends have proved that they know the secret."""
        return self._handshake is None

    @property
    def begun(self) -> bool:
        """Whether the other end has sent a hello of this protocol."""
        return self._handshake is None or self._handshake.begun

    @property
    def blocked(self) -> bool:
        """Whether bytes wait in this object until the socket accepts more."""
        return bool(self._unsent)

    @property
    def unread(self) -> bool:
        """Whether `recv_into` can return bytes that the system's socket no longer has."""
        if self._opener is None:
            return False
        try:
            return self._opener.ready()
        except LinkForged:
            return True  # `recv_into` raises it

    @property
    def plain(self) -> socket.socket | None:
        """The socket itself, if it can be used directly: the handshake is done, no received bytes wait here, and
        nothing is encrypted.
        """
        return self._socket if self.established and self._sealer is None and not self._unsent else None

    def flush(self) -> None:
        """Send the bytes that wait in this object, as many as the socket accepts."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]

    def sendmsg(self, parts: Sequence[memoryview]) -> int:
        """Accept bytes from the beginning of `parts` for sending; return the number of accepted bytes.

        `blocked` says whether accepted bytes still wait to be sent.

        Raises:
            BlockingIOError: nothing is accepted at the moment.
        """
        self.flush()
        if self._unsent or self._handshake is not None:
            raise BlockingIOError
        if self._sealer is None:
            return self._socket.sendmsg(parts)
        plain = parts[0][:RECORD]
        self._unsent = self._sealer.seal(plain)
        self.flush()
        return plain.nbytes

    def recv_into(self, room: memoryview) -> int:
        """Receive at most as many bytes as `room` has; return their number, 0 at the end of the connection.

        Raises:
            BlockingIOError: nothing has arrived.
            LinkForged: the other end does not know the secret, or a record was changed, dropped or repeated.
        """
        if self._handshake is not None and not self.shake():
            return 0
        if self._opener is None:
            return self._socket.recv_into(room)
        while not self._opener.ready():
            if not self._opener.fill(self._socket):
                return 0
        return self._opener.open(room)

    def shake(self) -> bool:
        """Continue the handshake until both ends are authenticated; return False if the connection ended before that.

        Raises:
            BlockingIOError: the other end has not sent what is due.
            LinkForged: the other end speaks another protocol, or does not know the secret.
        """
        while (handshake := self._handshake) is not None:
            data = self._socket.recv(handshake.due - len(self._arrived))
            self._arrived += data
            try:
                handshake.require_protocol(bytes(self._arrived))
                if len(self._arrived) < handshake.due:
                    if data:
                        continue
                    return False
                handshake.feed(bytes(self._arrived))
            except ProtocolError as error:
                with contextlib.suppress(OSError):
                    self._socket.send(handshake.out)
                raise LinkForged(str(error)) from None
            self._arrived.clear()
            self._unsent = memoryview(bytes(self._unsent) + handshake.out)
            handshake.out = b""
            if not handshake.due:
                self._handshake, keys = None, handshake.keys()
                if keys is not None:
                    self._sealer, self._opener = _Sealer(keys.sending), _Opener(keys.receiving)
            self.flush()
        return True


class _Sealer:
    """Encrypts the records of one direction."""

    def __init__(self, key: bytes):
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(key)
        self._count = 0
        self._record = memoryview(bytearray(_LENGTH.size + RECORD + _TAG))

    def seal(self, plain: memoryview) -> memoryview:
        """The record of at most `RECORD` bytes; it is overwritten by the next one."""
        record = self._record[: _LENGTH.size + plain.nbytes + _TAG]
        _LENGTH.pack_into(record, 0, plain.nbytes)
        nonce = self._count.to_bytes(_NONCE, "little")
        self._cipher.encrypt_into(nonce, plain, bytes(record[: _LENGTH.size]), record[_LENGTH.size :])
        self._count += 1
        return record


class _Opener:
    """Receives and decrypts the records of one direction."""

    def __init__(self, key: bytes):
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(key)
        self._count = 0
        self._buffer = memoryview(bytearray(_LENGTH.size + RECORD + _TAG))
        self._begin = self._end = 0
        self._spare = memoryview(bytearray(RECORD))
        self._left = self._spare[:0]
        """What was decrypted, but did not fit where the caller wanted it."""

    def ready(self) -> bool:
        """Whether `open` returns bytes without receiving more.

        Raises:
            LinkForged: the next record announces a length that no record has.
        """
        return bool(self._left) or self._end - self._begin >= self._needed()

    def fill(self, sock: socket.socket) -> int:
        """Receive what has arrived, as far as one record fits; return the number of bytes."""
        if self._begin:
            rest = bytes(self._buffer[self._begin : self._end])
            self._buffer[: len(rest)], self._begin, self._end = rest, 0, len(rest)
        count = sock.recv_into(self._buffer[self._end :])
        self._end += count
        return count

    def open(self, room: memoryview) -> int:
        """Decrypt the next record into `room`, or give what did not fit the last time; return the number of bytes."""
        if not self._left:
            size = self._needed() - _LENGTH.size - _TAG
            if size <= room.nbytes:
                self._decrypt(room[:size])
                return size
            self._decrypt(self._spare[:size])
            self._left = self._spare[:size]  # of a record that was changed, nothing is ever returned
        count = min(room.nbytes, self._left.nbytes)
        room[:count], self._left = self._left[:count], self._left[count:]
        return count

    def _needed(self) -> int:
        """Length of the next record with its frame, as far as it is known yet."""
        if self._end - self._begin < _LENGTH.size:
            return _LENGTH.size
        (size,) = _LENGTH.unpack_from(self._buffer, self._begin)
        if not 0 < size <= RECORD:
            raise LinkForged(f"a record of {size} bytes was announced, but records have 1 to {RECORD} bytes")
        return int(size) + _LENGTH.size + _TAG

    def _decrypt(self, into: memoryview) -> None:
        from cryptography.exceptions import InvalidTag

        begin, body = self._begin, self._begin + _LENGTH.size
        self._begin += self._needed()
        nonce = self._count.to_bytes(_NONCE, "little")
        try:
            self._cipher.decrypt_into(nonce, self._buffer[body : self._begin], bytes(self._buffer[begin:body]), into)
        except InvalidTag:
            raise LinkForged("a record was changed, dropped or repeated in transit") from None
        self._count += 1
