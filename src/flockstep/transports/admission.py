"""Which connections a listener keeps whose other ends have not yet proved that they know the secret of the run."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Sequence
from typing import Protocol, TypeVar

from flockstep.transports.handshake import time_for_proof

UNPROVED = 128
"""Largest number of connections that a listener keeps although their other ends have not proved that they know the
secret; each further connection closes one of them.
"""
_NETWORK = 64
"""Bits of an IPv6 address that name a network, all of whose addresses one host may use."""


class Unproved(Protocol):
    """A connection that another process has opened, and that may not have proved yet that it belongs to the run."""

    host: str
    """Numeric address of the other end."""
    since: float
    """Time at which the connection began, in seconds of the monotonic clock."""

    @property
    def begun(self) -> bool:
        """Whether the other end has sent a whole hello; anyone can do so."""

    @property
    def established(self) -> bool:
        """Whether the other end has proved that it knows the secret."""


AnyUnproved = TypeVar("AnyUnproved", bound=Unproved)


class Admission:
    """The rule by which a listener bounds the connections that have not proved yet that they know the secret.

    The bound protects the listener's memory and file descriptors. A host that opens many connections loses only its own
    connections as long as fewer than `UNPROVED` hosts do so at once, so that a peer with a long round trip keeps its
    connection until its proof arrives.
    """

    def __init__(self, heartbeat: float):
        self.limit = time_for_proof(heartbeat)
        """Seconds within which the other end of a connection must prove that it knows the secret."""

    def excess(self, connections: Sequence[AnyUnproved]) -> AnyUnproved | None:
        """Return the connection to close after the last of `connections` has been accepted; None if all may stay.

        The connection is one of the host with the most connections: a silent one, or else the oldest. The newest
        connection stays, because its hello can only be under way.
        """
        unproved = [one for one in connections if not one.established]
        if len(unproved) <= UNPROVED:
            return None
        hosts = Counter(_network(one.host) for one in unproved)
        return min(unproved[:-1], key=lambda one: (-hosts[_network(one.host)], one.begun))

    def overdue(self, connection: Unproved, now: float) -> bool:
        """Return whether the proof of a connection's other end is overdue."""
        return now > connection.since + self.limit


def _network(host: str) -> str:
    """The host itself for a Unix socket and for an IPv4 address, also if a listener at [::] writes the address as
    ::ffff:a.b.c.d; the network of an IPv6 address.
    """
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    return str(address.ipv4_mapped or ipaddress.ip_network((address, _NETWORK), strict=False))
