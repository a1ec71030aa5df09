"""The members of a collective, and the operations that a collective needs from them."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Sequence
from typing import Protocol

import numpy as np

from flockstep.messages import Address, AnyNote, Array, Message
from flockstep.nodes import Hosts
from flockstep.programs import Rendezvous, SharedArrays


class Group(Protocol):
    """One member of a group of `workers` that send each other messages, ranked from 0."""

    rank: int
    workers: int
    hosts: Hosts
    """Ranks of the members on each host."""
    random: np.random.Generator
    rendezvous: Rendezvous | None
    """The rendezvous through which process groups of other libraries are created; None if there is none."""
    shared: SharedArrays
    """Arrays in memory that members on this host share."""

    def send(self, to: Address, tag: str, array: Array | None = None, note: AnyNote | None = None) -> None:
        """Send a message to one member; the array is copied."""

    def send_all(
        self, to: Iterable[Address], tag: str, array: Array | None = None, note: AnyNote | None = None
    ) -> None:
        """Send one message to each of several members."""

    def receive(self, tag: str, source: Address) -> Awaitable[Message]:
        """Return the next message with the given tag from one member."""

    def receive_array(self, tag: str, source: Address, into: Array | None = None) -> Awaitable[Array]:
        """Return the array of the next message with the given tag from a member, in `into` if it is given.

        Raises:
            ProtocolError: a message of that member was lost.
        """

    def require_all(self, source: Address) -> None:
        """Check that no message of a member was lost.

        Raises:
            ProtocolError: a message was lost.
        """


class Subgroup:
    """Some members of a group, ranked in the order of `members`, one of which is `me`.

    Messages between two members arrive in order, so subgroups may share members as long as these use the subgroups in
    the same order. A subgroup does not use shared memory, because shared memory belongs to the whole group.
    """

    def __init__(self, me: Group, members: Sequence[int]) -> None:
        self._me = me
        self._members = members
        self.rank = members.index(me.rank)
        self.workers = len(members)
        self.hosts = _within(me.hosts, members)
        self.random = me.random
        self.rendezvous: Rendezvous | None = None
        self.shared = SharedArrays()

    def send(self, to: Address, tag: str, array: Array | None = None, note: AnyNote | None = None) -> None:
        """Send a message to one member of the subgroup."""
        self._me.send(self._members[to], tag, array, note)

    def send_all(
        self, to: Iterable[Address], tag: str, array: Array | None = None, note: AnyNote | None = None
    ) -> None:
        """Send one message to each of several members of the subgroup."""
        self._me.send_all([self._members[rank] for rank in to], tag, array, note)

    def receive(self, tag: str, source: Address) -> Awaitable[Message]:
        """Return the next message with the given tag from a member of the subgroup."""
        return self._me.receive(tag, self._members[source])

    def receive_array(self, tag: str, source: Address, into: Array | None = None) -> Awaitable[Array]:
        """Return the array of the next message with the given tag from a member of the subgroup."""
        return self._me.receive_array(tag, self._members[source], into)

    def require_all(self, source: Address) -> None:
        """Check that no message of a member of the subgroup was lost."""
        self._me.require_all(self._members[source])


def _within(hosts: Hosts, members: Sequence[int]) -> Hosts:
    """Return the hosts of a subgroup: the places of `members` in it, for each host that has any."""
    if len(hosts) == 1:
        return (tuple(range(len(members))),)
    place = {member: at for at, member in enumerate(members)}
    found = [tuple(sorted(place[member] for member in host if member in place)) for host in hosts]
    return tuple(sorted(host for host in found if host))
