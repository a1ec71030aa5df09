"""What a bus counts, and what it raises while a peer accepts no message."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.errors import PeerLost
from flockstep.messages import LAUNCHER as LAUNCHER


class Backlog(PeerLost):
    """Raised if the queue of a connected peer is full; the same message may be sent again later."""


@dataclass(slots=True)
class Traffic:
    """Counters of one node: payload bytes and messages sent and received, header bytes sent, connections refused.

    `resumed` counts connections that broke and were opened again; `corrupted` counts connections on which bytes were
    changed.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    header_bytes: int = 0
    rejected: int = 0
    resumed: int = 0
    corrupted: int = 0

    def sent(self, payload_bytes: int, header_bytes: int) -> None:
        """Count one sent message and its bytes."""
        self.messages_sent += 1
        self.sent_bytes += payload_bytes
        self.header_bytes += header_bytes

    def received(self, payload_bytes: int) -> None:
        """Count one received message and its bytes."""
        self.messages_received += 1
        self.received_bytes += payload_bytes

    def moved(self, sent: int, received: int, messages: int) -> None:
        """Count payload bytes that moved through shared memory, as if `messages` messages in each direction had carried
        them.
        """
        self.sent_bytes += sent
        self.received_bytes += received
        self.messages_sent += messages
        self.messages_received += messages
