"""What a runner needs of a seat, in a run of several processes or of one."""

from __future__ import annotations

from typing import Protocol

from flockstep.drivers.account import Account
from flockstep.messages import Message, Wanted
from flockstep.nodes import Node
from flockstep.programs import Work


class AnySeat(Protocol):
    """What a runner needs of a seat."""

    account: Account
    node: Node

    @property
    def now(self) -> float:
        """Seconds since the start."""

    def collect(self) -> None:
        """Take in what has arrived by now."""

    def wait(self, wanted: Wanted) -> Message:
        """The message that the program waits for."""

    def join(self, work: Work) -> None:
        """Wait for what is no message."""

    def report(self, loss: float | None) -> None:
        """A worker has completed a step."""

    def tick(self) -> None:
        """A worker is about to compute."""

    def server_ticks(self) -> None:
        """A server is about to wait."""
