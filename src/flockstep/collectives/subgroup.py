"""Some of the workers, as if they were all: so that a collective can run among them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from flockstep.messages import Address, Array, Beside, Message
from flockstep.nodes import Worker


class Subgroup:
    """What a collective sees of a worker, with ranks counted within `members`, of whom this worker is one.

    Messages between two members go in order, so subgroups may share workers as long as these use them in one order.
    """

    def __init__(self, me: Worker, members: Sequence[int]) -> None:
        self._me = me
        self._members = members
        self.rank = members.index(me.rank)
        self.workers = len(members)

    @property
    def peers(self) -> list[int]:
        """The other members."""
        return [rank for rank in range(self.workers) if rank != self.rank]

    @property
    def random(self) -> Any:
        """The worker's own generator."""
        return self._me.random

    @property
    def mailbox(self) -> Subgroup:
        """Answers `require_all`, like a mailbox."""
        return self

    def sum_together(self, array: Array, divisor: int = 1) -> bool:
        """Memory is shared by all workers or not at all: a subgroup sends messages."""
        return False

    def require_all(self, source: Address) -> None:
        """As the mailbox's."""
        self._me.mailbox.require_all(self._members[source])

    def send(self, to: Address, tag: str, array: Array | None = None, note: Beside | None = None) -> None:
        """As the worker's, to a member."""
        self._me.send(self._members[to], tag, array, note)

    def send_all(self, to: Iterable[Address], tag: str, array: Array | None = None, note: Beside | None = None) -> None:
        """As the worker's, to members."""
        self._me.send_all([self._members[rank] for rank in to], tag, array, note)

    async def receive(self, tag: str, source: Address) -> Message:
        """As the worker's, from a member."""
        return await self._me.receive(tag, self._members[source])


def among(me: Worker, members: Sequence[int]) -> Worker:
    """This worker as one of `members`, for a collective: it has what those use of a worker."""
    return cast(Worker, Subgroup(me, members))
