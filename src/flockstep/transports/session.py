"""A session between two nodes, which continues over as many connections as needed.

A session numbers the bytes that each end sends. An end keeps the bytes that the other end has not acknowledged. When a
connection breaks, the nodes open another connection, tell each other how many bytes have arrived, and continue with the
next byte. So each byte is delivered exactly once and in order, wherever the connection broke.
"""

from __future__ import annotations

import secrets
from collections import deque

from flockstep.errors import ProtocolError

ACKNOWLEDGED = 1 << 18
"""Number of received bytes after which this end tells the other end how many bytes have arrived."""
LINK_TIMEOUT = 60.0
"""Default link timeout: seconds for which the connection between two hosts may be interrupted before the other end
counts as lost.
"""


def new_key() -> str:
    """Return the random key of a new session, by which both ends recognize the session."""
    return secrets.token_hex(16)


class Session:
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
