"""Who takes part in a collective, and what it needs of them."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Sequence
from typing import Protocol

import numpy as np

from flockstep.messages import Address, Array, Beside, Message
from flockstep.programs import Rendezvous, SharedSum


class Group(Protocol):
    """One member of a group of `workers`, ranked from 0, who send each other messages."""

    rank: int
    workers: int
    random: np.random.Generator
    rendezvous: Rendezvous | None
    """Where they meet outside of messages, if they do."""
    together: SharedSum | None
    """Those who share memory with this member, if that is all of the group."""

    def sum_together(self, array: Array, divisor: int = 1) -> bool:
        """Replace `array` by the sum over all members, divided, in memory that they share; False where they do not."""

    def send(self, to: Address, tag: str, array: Array | None = None, note: Beside | None = None) -> None:
        """Send a message; the array is copied."""

    def send_all(self, to: Iterable[Address], tag: str, array: Array | None = None, note: Beside | None = None) -> None:
        """Send the same message to several members."""

    def receive(self, tag: str, source: Address) -> Awaitable[Message]:
        """The next message with that tag from that member."""

    def receive_array(self, tag: str, source: Address, into: Array | None = None) -> Awaitable[Array]:
        """The array of that message, in `into` where that is given; raises as `require_all`."""

    def require_all(self, source: Address) -> None:
        """Raise `ProtocolError` if a message of that member got lost."""


class Subgroup:
    """Some of a group, ranked in the order of `members`, one of whom is `me`.

    Messages between two members go in order, so subgroups may share members as long as these use them in one order.
    They share no memory: either all of a group do, or none.
    """

    def __init__(self, me: Group, members: Sequence[int]) -> None:
        self._me = me
        self._members = members
        self.rank = members.index(me.rank)
        self.workers = len(members)
        self.random = me.random
        self.rendezvous: Rendezvous | None = None
        self.together: SharedSum | None = None

    def sum_together(self, array: Array, divisor: int = 1) -> bool:
        """They do not share memory."""
        return False

    def send(self, to: Address, tag: str, array: Array | None = None, note: Beside | None = None) -> None:
        """As `me`, to a member."""
        self._me.send(self._members[to], tag, array, note)

    def send_all(self, to: Iterable[Address], tag: str, array: Array | None = None, note: Beside | None = None) -> None:
        """As `me`, to members."""
        self._me.send_all([self._members[rank] for rank in to], tag, array, note)

    def receive(self, tag: str, source: Address) -> Awaitable[Message]:
        """As `me`, from a member."""
        return self._me.receive(tag, self._members[source])

    def receive_array(self, tag: str, source: Address, into: Array | None = None) -> Awaitable[Array]:
        """As `me`, from a member."""
        return self._me.receive_array(tag, self._members[source], into)

    def require_all(self, source: Address) -> None:
        """As `me`, of a member."""
        self._me.require_all(self._members[source])
