"""This process's part in a run, and the communicator that is beside it."""

from __future__ import annotations

from collections.abc import Callable

from flockstep.drivers.account import Account
from flockstep.drivers.member import Member


class Place:
    """This process's part in a run, which a communicator may be beside."""

    def __init__(self, member: Member, figure: Callable[[str, float], None]):
        """`figure` puts a figure on the record."""
        self.member, self.figure = member, figure
        self.close_communicator: Callable[[], None] | None = None

    def leave(self) -> None:
        """The part ends: so does the communicator."""
        if self.close_communicator is not None:
            self.close_communicator()

    def finish(self, account: Account) -> None:
        """The communicator has ended, with that account of what it moved."""
        self.figure("mover_sent", account.traffic.sent_bytes)
        self.figure("mover_messages", account.traffic.messages_sent)

    def fail(self, error: Exception) -> None:
        """No communicator has come about; the strategy may go on without."""


_places: list[Place] = []
"""At most one: a process takes part in one run, as it has one ticket in its environment."""


def take_place(place: Place) -> None:
    """This process takes part in a run from now on."""
    _places[:] = [place]


def place_here() -> Place | None:
    """The part of this process; None where it has none."""
    return _places[0] if _places else None
