"""A connection between two nodes, the session that it carries, and the bound on connections of strangers.

A session numbers the bytes that each end sends. An end keeps the bytes that the other end has not acknowledged. When a
connection breaks, the nodes open another connection, tell each other how many bytes have arrived, and continue with the
next byte. So each byte is delivered exactly once and in order, wherever the connection broke.
"""

from __future__ import annotations

import ipaddress
import math
import socket
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from flockstep.errors import ProtocolError
from flockstep.links.copies import BufferPool
from flockstep.links.sealed import SealedSocket
from flockstep.messages import Address, Message

ACKNOWLEDGED = 1 << 18
"""Number of received bytes after which this end tells the other end how many bytes have arrived."""
LINK_TIMEOUT = 60.0
"""Default link timeout: seconds for which the connection between two hosts may be interrupted before the other end
counts as lost.
"""
STAGING = 1 << 17
"""Number of bytes of one read if no large payload is expected; it exceeds the size of the largest header."""
UNPROVED = 128
"""Largest number of connections that a listener keeps although their other ends have not proved that they know the
secret; each further connection closes one of them.
"""
_NETWORK = 64
"""Bits of an IPv6 address that name a network, all of whose addresses one host may use."""


class LinkSession:
    """One end of a session, without a connection."""

    def __init__(self, key: str):
        """`key`: the key on which both ends agreed."""
        self.key = key
        self.received = 0
        """Number of bytes that have arrived in order."""
        self.told = 0
        """Number of bytes that the other end knows to have arrived here."""
        self.sent = 0
        """Number of bytes that were written to a connection."""
        self.acknowledged = 0
        """Number of bytes that the other end has received."""
        self._kept: deque[memoryview] = deque()
        """Bytes `acknowledged` to `sent`."""

    @property
    def unacknowledged(self) -> int:
        """Number of bytes that were sent and not yet acknowledged, which are kept so that they can be sent again."""
        return self.sent - self.acknowledged

    def keep(self, part: memoryview) -> None:
        """Keep bytes that were written to a connection until the other end acknowledges that they have arrived."""
        self._kept.append(part)
        self.sent += part.nbytes

    def acknowledge(self, count: int) -> None:
        """Drop the bytes up to number `count`, which the other end has received.

        A number lower than the last is ignored.

        Raises:
            ProtocolError: fewer than `count` bytes were sent.
        """
        if count > self.sent:
            raise ProtocolError(f"the other end acknowledges {count} bytes, but only {self.sent} bytes were sent")
        left = count - self.acknowledged
        if left <= 0:
            return
        self.acknowledged = count
        kept = self._kept
        while left and left >= kept[0].nbytes:
            left -= kept.popleft().nbytes
        if left:
            kept[0] = kept[0][left:]

    def replace_end(self, copy: memoryview) -> None:
        """Keep `copy` in place of the last `copy.nbytes` bytes, because the memory of these bytes may change."""
        replace_end(self._kept, copy)

    def rewind(self, count: int) -> deque[memoryview]:
        """Return the bytes to send again on a new connection, given that `count` bytes have arrived at the other end.

        Raises:
            ProtocolError: the other end names a number of bytes that is impossible.
        """
        if count < self.acknowledged:
            raise ProtocolError(
                f"the other end says that {count} bytes have arrived, but it has already acknowledged "
                f"{self.acknowledged} bytes"
            )
        self.acknowledge(count)
        again, self._kept = self._kept, deque()
        self.sent = count
        return again


def replace_end(parts: deque[memoryview], copy: memoryview) -> None:
    """Put `copy` in place of the last `copy.nbytes` bytes of `parts`."""
    left = copy.nbytes
    while left and left >= parts[-1].nbytes:
        left -= parts.pop().nbytes
    if left:
        parts[-1] = parts[-1][:-left]
    if copy.nbytes:
        parts.append(copy)


@dataclass
class Dial:
    """Attempts to connect to a peer that has not greeted yet."""

    address: str
    key: str
    """Key of the session with the peer; empty within a host."""
    since: float
    """Time of the first attempt, in seconds of the monotonic clock."""
    count: int = 0
    due: float = 0.0
    """Time of the next attempt; infinite while an attempt is under way."""


class PeerLink:
    """One connection and the state of its incoming and outgoing messages."""

    refused = False
    """Whether nothing listens at the address to which this node connects."""
    closed = False
    """Whether the connection broke because the other end closed it."""

    def __init__(self, sock: socket.socket | SealedSocket, host: str, wanted: Address | None):
        self.socket = sock
        self.host = host
        """Numeric address of the other end's host; empty for a Unix socket."""
        self.since = time.monotonic()
        """Time at which the connection began, in seconds of the monotonic clock."""
        self.where = ""
        """Address to which this node has connected."""
        self.wanted = wanted
        """The peer that this node has connected to; None if the other end connected."""
        self.greeting: Message | None = None
        self.session: LinkSession | None = None
        """The session with the peer, which goes on when the connection breaks; None within a host."""
        self.down = math.inf
        """Time at which the connection broke; infinite while there is a connection."""
        self.why = ""
        """Reason for which the connection broke."""
        self.left = False
        """Whether the peer has said that it leaves, so that it is not to be connected to again."""
        self.writing = False
        """Whether a message is being written, so that its payload must stay the last part of the queue."""
        self.checked = self.since, 0, 0
        """Last check at which bytes had arrived since the check before; bytes received and sent at the last check."""
        self.open = True
        self.deaf = False
        """Whether the other end no longer accepts data."""
        self.armed = False
        """Whether epoll reports when the socket can be written again."""
        self.out: deque[memoryview] = deque()
        self.waiting = 0
        """Number of bytes queued in `out`."""
        self.staging = memoryview(b"")
        """Buffer for what is read; empty until the other end is proved."""
        self.end = 0
        """Number of bytes in `staging` that have been read."""
        self.ahead = STAGING
        """Bytes per read: few if a large payload is expected, which is received directly into its own buffer."""
        self.header = b""
        self.body: memoryview | None = None
        """The payload that is arriving, of which `filled` bytes have been received."""
        self.filled = 0

    @property
    def established(self) -> bool:
        """Whether the other end has proved that it belongs to this run; a socket in a private folder needs no proof."""
        return isinstance(self.socket, socket.socket) or self.socket.established

    @property
    def begun(self) -> bool:
        """Whether the other end has sent a whole hello; anyone can do so."""
        return isinstance(self.socket, SealedSocket) and self.socket.begun

    def has_output(self) -> bool:
        """Whether the socket is to report when it accepts more bytes."""
        return (bool(self.out) and self.established) or (isinstance(self.socket, SealedSocket) and self.socket.blocked)

    def has_input(self) -> bool:
        """Whether bytes were received that the system's socket no longer reports."""
        return isinstance(self.socket, SealedSocket) and self.socket.unread

    def usable(self) -> bool:
        """Whether messages can be sent to the peer, if only later."""
        return self.open and (self.session is not None or not self.deaf)

    def connected(self) -> bool:
        """Whether the connection is open, and has not broken."""
        return self.open and self.down == math.inf

    def own(self, payload: memoryview, pool: BufferPool) -> None:
        """Copy what the peer has not acknowledged of `payload`, which was written last and may change from now on."""
        unsent, kept = min(payload.nbytes, self.waiting), 0
        if self.session is not None:
            kept = min(payload.nbytes - unsent, self.session.unacknowledged)
        if not (self.open and unsent + kept):
            return
        copy = pool.room(unsent + kept).data
        copy[:] = payload[payload.nbytes - unsent - kept :]
        if self.session is not None:
            self.session.replace_end(copy[:kept])
        replace_end(self.out, copy[kept:])


def excess(connections: Sequence[PeerLink]) -> PeerLink | None:
    """Return the connection to close after the last of `connections` has been accepted; None if all may stay.

    The bound protects the listener's memory and file descriptors. The connection is one of the host with the most
    connections that are not proved: a silent one, or else the oldest. So a host that opens many loses only its own as
    long as fewer than `UNPROVED` hosts do so at once, and a peer with a long round trip keeps its connection until its
    proof arrives. The newest connection stays, because its hello can only be under way.
    """
    unproved = [one for one in connections if not one.established]
    if len(unproved) <= UNPROVED:
        return None
    hosts = Counter(_network(one.host) for one in unproved)
    return min(unproved[:-1], key=lambda one: (-hosts[_network(one.host)], one.begun))


def _network(host: str) -> str:
    """The host itself for a Unix socket and for an IPv4 address, also if a listener at [::] writes the address as
    ::ffff:a.b.c.d; the network of an IPv6 address.
    """
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    return str(address.ipv4_mapped or ipaddress.ip_network((address, _NETWORK), strict=False))
