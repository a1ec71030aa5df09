"""The contract of a bus: what delivers messages between the nodes of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from flockstep.errors import ConfigurationError, PeerLost
from flockstep.messages import Address, Array, Message, Wanted

LAUNCHER: Address = 1 << 30
"""The address of the process that supervises the run."""


class Backlog(PeerLost):
    """The peer is connected, and takes no more messages at the moment: the same message may be sent again later."""


@dataclass
class Traffic:
    """Payload bytes and messages that a node sent and received, and the bytes of the headers it sent."""

    sent_bytes: int = 0
    received_bytes: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    header_bytes: int = 0

    def sent(self, message: Message, header_bytes: int) -> None:
        """Count a message that was sent."""
        self.messages_sent += 1
        if message.array is not None:
            self.sent_bytes += message.array.nbytes
        self.header_bytes += header_bytes

    def received(self, message: Message) -> None:
        """Count a message that arrived."""
        self.messages_received += 1
        if message.array is not None:
            self.received_bytes += message.array.nbytes

    def moved(self, sent: int, received: int, messages: int) -> None:
        """Count payload bytes that did not travel as messages, as that number of messages each way."""
        self.sent_bytes += sent
        self.received_bytes += received
        self.messages_sent += messages
        self.messages_received += messages


class Bus(ABC):
    """Delivers messages between one node and its peers, in order for each pair of nodes.

    `address` is what a peer needs to connect; `traffic` counts what peers send and receive, without greetings.
    """

    address: str
    traffic: Traffic

    @abstractmethod
    def connect(self, peers: Mapping[Address, str]) -> None:
        """Connect to the peers at their addresses, and accept no others; `poll` until all of them are `reachable`."""

    @abstractmethod
    def disconnect(self, peer: Address) -> None:
        """Give up a peer that was lost, and free the memory that was lent to it."""

    @abstractmethod
    def reachable(self, peer: Address) -> bool:
        """Whether the connection to the peer stands."""

    @abstractmethod
    def waiting(self, peer: Address) -> int:
        """Bytes of messages to the peer that have not been given to the system yet."""

    @abstractmethod
    def broken(self, seconds: float) -> set[Address]:
        """The peers whose connection ended at least so long ago, for whatever reason."""

    @abstractmethod
    def send(self, to: Address, message: Message) -> None:
        """Send a message to a peer without waiting for it; an array that is not lent may change afterwards.

        Raises:
            Backlog: too many messages, or bytes, wait for the peer; the same message may be sent again later.
            PeerLost: the peer is not connected.
        """

    @abstractmethod
    def poll(self, seconds: float | None, also: Collection[int] = (), wanted: Wanted | None = None) -> Message | None:
        """The next message; None if none came within `seconds` (None: no limit), or a descriptor of `also` can be read.

        If it is `wanted`, its array may be received in that message's `place`, and then is that array.

        Raises:
            ProtocolError: a peer sent something that is not as agreed.
        """

    @abstractmethod
    def lend(self, array: Array) -> Array:
        """A read-only copy of the array, in memory that peers can reach where there is some."""

    @abstractmethod
    def close(self, linger: float) -> None:
        """Close; what was sent is still delivered, for up to `linger` seconds."""


def cannot_listen(address: str, why: str) -> ConfigurationError:
    """The error of a node that cannot listen at ipc://PATH or tcp://HOST:PORT."""
    way_out = (
        "use an address of this machine, such as 127.0.0.1"
        if address.startswith("tcp:")
        else "set TMPDIR to a folder with a short path, or use --transport tcp"
    )
    return ConfigurationError(f"cannot listen on {address}: {why}; {way_out}")
