"""The interface of a bus, which delivers messages between the nodes of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from flockstep.errors import PeerLost
from flockstep.messages import LAUNCHER as LAUNCHER
from flockstep.messages import Address, Array, Message, Wanted


class Backlog(PeerLost):
    """Raised if the queue of a connected peer is full; the same message may be sent again later."""


@dataclass
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

    def sent(self, message: Message, header_bytes: int) -> None:
        """Count one sent message and its bytes."""
        self.messages_sent += 1
        if message.array is not None:
            self.sent_bytes += message.array.nbytes
        self.header_bytes += header_bytes

    def received(self, message: Message) -> None:
        """Count one received message and its bytes."""
        self.messages_received += 1
        if message.array is not None:
            self.received_bytes += message.array.nbytes

    def moved(self, sent: int, received: int, messages: int) -> None:
        """Count payload bytes that moved through shared memory, as if `messages` messages in each direction had carried
        them.
        """
        self.sent_bytes += sent
        self.received_bytes += received
        self.messages_sent += messages
        self.messages_received += messages


class Bus(ABC):
    """Delivers messages between one node and its peers, in order for each pair of nodes.

    `address` is where peers connect; `traffic` counts the messages exchanged with peers, without greetings.
    """

    address: str
    traffic: Traffic

    @abstractmethod
    def connect(self, peers: Mapping[Address, str]) -> None:
        """Connect to the peers at their addresses and accept no other connections.

        Call `poll` until all peers are `reachable`.
        """

    @abstractmethod
    def disconnect(self, peer: Address) -> None:
        """Close the connection to a lost peer, and free the memory that the peer could read."""

    @abstractmethod
    def reachable(self, peer: Address) -> bool:
        """Return whether the connection to the peer is established."""

    @abstractmethod
    def waiting(self, peer: Address) -> int:
        """Return the number of bytes that wait in this process to be sent to the peer."""

    @abstractmethod
    def broken(self, seconds: float) -> set[Address]:
        """Return the peers whose connection broke at least `seconds` ago, for any reason."""

    @abstractmethod
    def why_broken(self, peer: Address) -> str:
        """Return the reason why the connection to a peer ended, as a sentence without a final period."""

    @abstractmethod
    def send(self, to: Address, message: Message) -> None:
        """Send a message to a peer without waiting.

        The caller may change the array afterwards, unless `copy_for_sending` returned the array.

        Raises:
            Backlog: too many messages or bytes are queued for the peer; the same message may be sent again later.
            PeerLost: the peer is not connected.
        """

    @abstractmethod
    def poll(self, seconds: float | None, also: Collection[int] = (), wanted: Wanted | None = None) -> Message | None:
        """Return the next message; None if none arrived within `seconds` or a descriptor of `also` became readable.

        Args:
            seconds: time limit; None waits without limit.
            also: file descriptors that end the wait when they become readable.
            wanted: the message that the caller expects. Its array may be received directly into `wanted.place`; then
                the message's array is that place.

        Raises:
            ProtocolError: a peer sent a message that breaks the protocol.
        """

    @abstractmethod
    def copy_for_sending(self, array: Array) -> Array:
        """Return a read-only copy of the array, in memory that peers can read if such memory is available."""

    @abstractmethod
    def release(self) -> None:
        """Give the memory of sent and received arrays to which nothing refers any more back to the operating system."""

    @abstractmethod
    def close(self, linger: float) -> None:
        """Close the bus; queued messages are delivered for up to `linger` seconds."""
