"""This process's part in a run, and the communicator that it may open in addition."""

from __future__ import annotations

from collections.abc import Callable

from flockstep.drivers.account import Account
from flockstep.drivers.member import Member


class Membership:
    """This process's part in a run, which may have a communicator."""

    def __init__(self, member: Member, scalar: Callable[[str, float], None]):
        """`scalar`: function that records a scalar."""
        self.member, self.scalar = member, scalar
        self.close_communicator: Callable[[], None] | None = None

    def leave(self) -> None:
        """End the part, and close its communicator."""
        if self.close_communicator is not None:
            self.close_communicator()

    def finish(self, account: Account) -> None:
        """Record the traffic of a communicator that has ended."""
        self.scalar("communicator_sent_bytes", account.traffic.sent_bytes)
        self.scalar("communicator_messages", account.traffic.messages_sent)

    def fail(self, error: Exception) -> None:
        """Handle a communicator that could not be created; the strategy may continue without it."""


_places: list[Membership] = []
"""At most one entry: a process takes part in one run, because its environment holds one ticket."""


def take_place(place: Membership) -> None:
    """Set this process's part in a run."""
    _places[:] = [place]


def place_here() -> Membership | None:
    """This process's part in a run; None if it has none."""
    return _places[0] if _places else None
