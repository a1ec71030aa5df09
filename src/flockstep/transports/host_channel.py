"""A channel between the coordinator of a run and the agent of a host: messages over one authenticated connection.

A message is a header of at most `MAX_HEADER` bytes and up to two payloads, each preceded by its length, and the number
of bytes that have arrived from the other end. If an end has sent no message for a while, it sends an empty message, a
heartbeat, so that each end notices when the other stops. A thread sends the heartbeats, because the process may be busy
starting other processes or writing files. A channel is a session: if its connection breaks, the channel continues over
another connection.
"""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from flockstep.errors import PeerLost, ProtocolError
from flockstep.transports.sealed import SealedSocket
from flockstep.transports.session import ACKNOWLEDGED, Session

MAX_HEADER = 1 << 20
"""Largest size of a header in bytes."""
MAX_PAYLOAD = 1 << 36
"""Largest payload in bytes from an authenticated end; an end that is not authenticated may send no payload."""
READ = 1 << 22
"""Number of bytes after which `receive` returns even if more have arrived, so that one host cannot keep the coordinator
busy.
"""
_PREFIX = struct.Struct("<IQQQ")
_ABSENT = (1 << 64) - 1


class HostChannel:
    """One end of a channel. No method waits.

    Call `receive` whenever the socket is readable, or writable if `blocked`.
    """

    def __init__(
        self,
        sock: socket.socket,
        secret: bytes,
        connects: bool,
        heartbeat: float,
        now: Callable[[], float] = time.monotonic,
    ):
        """`connects`: this end has opened the connection; `heartbeat`: seconds of silence after which the other end
        counts as lost.
        """
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.host: str = sock.getpeername()[0]
        """Numeric address of the other end."""
        self.since = time.monotonic()
        """Time at which the connection began, in seconds of the monotonic clock."""
        self.own: str = sock.getsockname()[0]
        """Address of this end."""
        self._socket = SealedSocket(sock, secret, connects, encrypts=True, purpose="the coordinator of hosts")
        self._session = Session("")
        self.down = math.inf
        """Time at which the connection broke; infinite while there is a connection."""
        self.why, self.closed = "", False
        """Reason for which the connection broke, and whether the other end closed it."""
        self.heartbeat = heartbeat
        """Seconds of silence after which the other end counts as lost."""
        self._now = now
        self._out: deque[memoryview] = deque()
        self._sent = self._heard = now()
        self._prefix = bytearray(_PREFIX.size)
        self._rooms: list[memoryview] = [memoryview(self._prefix)]
        """What the next bytes are received into, one after the other."""
        self._parts: list[memoryview] = []
        self._at = 0
        self._lock = threading.RLock()
        """Held while something is sent."""
        self._closed = threading.Event()
        self._most = 0
        """Largest payload that is accepted now, in bytes."""

    def fileno(self) -> int:
        """File descriptor of the socket, to wait for."""
        return self._socket.fileno()

    @property
    def established(self) -> bool:
        """Whether both ends have proved that they know the secret."""
        return self._socket.established

    @property
    def begun(self) -> bool:
        """Whether the other end has sent a hello of this protocol."""
        return self._socket.begun

    @property
    def backlog(self) -> int:
        """Bytes that wait to be encrypted and sent, or that the other end has not acknowledged."""
        with self._lock:
            return sum(part.nbytes for part in self._out) + self._session.unacknowledged

    @property
    def connected(self) -> bool:
        """Whether the channel has a connection at this time."""
        return self.down == math.inf

    @property
    def blocked(self) -> bool:
        """Whether bytes are queued because the socket accepts no more of them at present."""
        return self.connected and (self._socket.blocked or bool(self._out and self.established))

    @property
    def silent(self) -> bool:
        """Whether the other end has sent nothing for at least a heartbeat timeout."""
        return self.connected and self._now() - self._heard > self.heartbeat

    @property
    def received(self) -> int:
        """Number of bytes that have arrived from the other end."""
        return self._session.received

    def interrupt(self, why: str, closed: bool) -> None:
        """Handle a broken connection: messages are queued until `resume`. `closed` says whether the other end closed
        the connection.
        """
        with self._lock:
            self._socket.close()
            self.down, self.why, self.closed = self._now(), why, closed

    def begin_session(self) -> None:
        """Count the bytes of both ends from zero, because the other end sends its session again from the beginning."""
        self._session = Session("")

    def resume(self, fresh: HostChannel, received: int) -> float:
        """Continue the session over the connection of a new channel; `received` is the number of bytes that had arrived
        at its other end.

        Returns:
            The seconds without a connection.

        Raises:
            ProtocolError: the number of bytes is impossible.
        """
        with self._lock:
            again = self._session.rewind(received)
            self._out.extendleft(reversed(again))
            self._socket.close()
            self._socket, self.host, self.own = fresh._socket, fresh.host, fresh.own
            away = self._now() - min(self.down, self._now())
            self._sent = self._heard = self._now()
            self.down = math.inf
            return away

    def send(self, header: bytes, payloads: Sequence[bytes | bytearray | memoryview] = ()) -> None:
        """Queue a message; the payloads, at most two, must not change afterwards."""
        lengths = [memoryview(one).nbytes for one in payloads] + [_ABSENT] * (2 - len(payloads))
        with self._lock:
            self._session.told = self._session.received
            self._out.append(memoryview(_PREFIX.pack(len(header), *lengths, self._session.received) + header))
            self._out.extend(memoryview(one).cast("B") for one in payloads if memoryview(one).nbytes)
            self._sent = self._now()

    def keep_alive(self) -> None:
        """Trust the other end from now on: accept its payloads, and send a heartbeat whenever nothing was sent for a
        quarter of the heartbeat timeout.
        """
        self._most = MAX_PAYLOAD
        threading.Thread(target=self._beat, name="flockstep-beats", daemon=True).start()

    def _beat(self) -> None:
        while not self._closed.wait(self.heartbeat / 8):
            with self._lock, contextlib.suppress(PeerLost):  # seen by who receives
                if self._closed.is_set():
                    return
                if self.connected and not self._out and self._now() - self._sent > self.heartbeat / 4:
                    self.send(b"")
                self.flush()

    def flush(self) -> None:
        """Send the queued bytes, as many as the socket accepts.

        Raises:
            PeerLost: the connection is closed.
        """
        with self._lock:
            if not self.connected:
                return
            try:
                self._socket.flush()
                with contextlib.suppress(BlockingIOError):
                    while self._out:
                        taken = self._socket.sendmsg([self._out[0]])
                        self._session.keep(self._out[0][:taken])
                        self._out[0] = self._out[0][taken:]
                        if not self._out[0].nbytes:
                            self._out.popleft()
            except OSError as error:
                raise PeerLost(str(error)) from None

    def receive(self, most: float = math.inf) -> list[tuple[bytes, list[memoryview]]]:
        """Return the messages that have arrived, at most `most`, each with a header and its payloads; heartbeats are
        left out.

        Raises:
            PeerLost: the connection is closed, or the other end does not know the secret.
            ProtocolError: the other end breaks the protocol.
        """
        found: list[tuple[bytes, list[memoryview]]] = []
        read = 0
        try:
            while self.connected and read < READ and len(found) < most:
                count = self._socket.recv_into(self._rooms[0][self._at :])
                if not count and not found:
                    raise PeerLost("the other host closed the connection")
                if not count:
                    break
                self._heard = self._now()
                read += count
                self._session.received += count
                self._at += count
                if self._at == self._rooms[0].nbytes:
                    self._advance(found)
        except BlockingIOError:
            pass
        except OSError as error:
            if not found:
                raise PeerLost(str(error)) from error
        if self._session.received - self._session.told >= ACKNOWLEDGED:
            self.send(b"")
        return found

    def _advance(self, found: list[tuple[bytes, list[memoryview]]]) -> None:
        """The first room is full: go on to the next, or complete the message."""
        room, self._at = self._rooms.pop(0), 0
        if room.obj is self._prefix:
            header, *lengths, arrived = _PREFIX.unpack(self._prefix)
            with self._lock:
                self._session.acknowledge(arrived)
            payloads = [length for length in lengths if length != _ABSENT]
            if header > MAX_HEADER or any(length > self._most for length in payloads):
                raise ProtocolError(
                    f"the other host announced a message of {header} and {payloads} bytes, which is too long"
                )
            self._parts = [_room(length) for length in (header, *payloads)]
            self._rooms = [part for part in self._parts if part.nbytes]
        if not self._rooms:
            if self._parts[0].nbytes:
                found.append((bytes(self._parts[0]), self._parts[1:]))
            self._rooms = [memoryview(self._prefix)]

    def close(self) -> None:
        """Close the connection to the host."""
        with self._lock:
            self._closed.set()
            self._socket.close()


def _room(nbytes: int) -> memoryview:
    """Room for so many bytes, which takes memory only as they arrive.

    Raises:
        ProtocolError: there is no memory for so many bytes.
    """
    try:
        return np.empty(nbytes, np.uint8).data
    except MemoryError:
        raise ProtocolError(f"the other host announced {nbytes} bytes, which are more than the memory") from None
