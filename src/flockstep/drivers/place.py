"""This process's part in a run, and the communicator that is beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flockstep.drivers.member import Member


@dataclass
class Place:
    """This process's part in a run, which a communicator may be beside."""

    member: Member
    figure: Callable[[str, float], None]
    """Puts a figure on the record."""
    close_communicator: Callable[[], None] | None = None

    def leave(self) -> None:
        """The part ends: so does the communicator."""
        if self.close_communicator is not None:
            self.close_communicator()


_places: list[Place] = []
"""At most one: a process takes part in one run, as it has one ticket in its environment."""


def take_place(place: Place) -> None:
    """This process takes part in a run from now on."""
    _places[:] = [place]


def place_here() -> Place | None:
    """The part of this process; None where it has none."""
    return _places[0] if _places else None
