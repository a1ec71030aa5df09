"""How a process comes to a mover: beside its strategy, in place of one, or all alone."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from flockstep.arrays.schema import Schema
from flockstep.drivers.account import Account
from flockstep.drivers.member import Member, Ticket, die_with, failure_of
from flockstep.drivers.reports import Reports
from flockstep.drivers.tracker import FINAL
from flockstep.errors import ConfigurationError, FlockstepError
from flockstep.messages import Fields
from flockstep.nodes import Cluster
from flockstep.strategies.base import Strategy, Traits

MOVER = "mover"
"""What a process says about its mover to the supervisor, and the supervisor to a mover."""
NOTHING = Schema.of({"nothing": (1,)})
"""The model of a script that has none."""


@dataclass(frozen=True)
class Unled(Strategy):
    """What a script follows that only moves arrays: it does as it likes, and goes on when a worker dies."""

    @property
    def traits(self) -> Traits:
        """There is no resulting model."""
        return Traits(completeness=4, survives=True, results=())

    async def worker(self, me: object) -> None:
        """The script itself is the program."""


def rule_of(text: str) -> Strategy:
    """The strategy that a process says it follows; "" of one that follows none."""
    return Strategy.parse(text) if text else Unled()


@dataclass
class Place:
    """This process's part in a run, which a mover may be beside."""

    member: Member
    figure: Callable[[str, float], None]
    """Puts a figure on the record."""
    mover: Callable[[], None] | None = None
    """Closes the mover that is beside it."""

    def leave(self) -> None:
        """The part ends: so does the mover."""
        if self.mover is not None:
            self.mover()


_places: list[Place] = []
"""At most one: a process takes part in one run, as it has one ticket in its environment."""


def take_place(place: Place) -> None:
    """This process takes part in a run from now on."""
    _places[:] = [place]


def place_here() -> Place | None:
    """The part of this process; None where it has none."""
    return _places[0] if _places else None


def sockets_beside(member: Member, max_bytes: int) -> Member:
    """Sockets of a mover's own beside those of `member`, connected to all other movers of the run.

    Raises:
        ConfigurationError: another worker's mover takes arrays of another size.
        PeerLost: another worker died, or left the run without a mover.
    """
    ticket = member.ticket
    _private(Path(ticket.directory))
    beside = Member(ticket, NOTHING, max_bytes)
    try:
        member.tell(MOVER, None, {"line": beside.line.address, "bus": beside.bus.address, "largest": max_bytes})
        beside.meet_all(MOVER)
        member.tell(MOVER, None, {"met": 1})
        beside.wait_for("go")
    except FlockstepError:
        beside.close(0.0)
        raise
    return beside


def _private(directory: Path) -> None:
    """The run's folder for sockets, which is gone once all have met, anew; nobody else may have made it."""
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077 or found.st_uid != os.getuid():
        raise ConfigurationError(f"{directory} belongs to somebody else; remove it and start the run again")


class ScriptPlace:
    """A script's part in a run where it follows no strategy: let in, watched, recorded, dismissed."""

    def __init__(self, ticket: Ticket):
        """Take part.

        Raises:
            ConfigurationError: the supervisor refused, for example because another worker follows a strategy.
        """
        die_with(ticket.supervisor, ticket.directory)
        self.member = Member(ticket, NOTHING)
        self._failed = self._over = False
        self._hook, sys.excepthook = sys.excepthook, self._on_crash
        self._start = time.monotonic()
        try:
            self.cluster: Cluster = self.member.join("", {}, np.zeros(1, np.float32))[0]
        except FlockstepError as error:
            self.fail(error)
            raise

    def finish(self, account: Account) -> None:
        """All is done: write the totals, and wait until everyone else has come to the end."""
        if self._failed:
            return
        now = time.monotonic() - self._start
        account.emit = Reports(self.member).write
        account.close(now, np.empty(0, np.float32))
        note: Fields = {"tick": FINAL, "t": now, "step": 0, "sent": account.traffic.sent_bytes}
        self.member.tell("done", np.zeros(1, np.float32), note)
        try:
            self.member.wait_for_end()
            self._over = True
        finally:
            self._failed = True
            self.member.close(0.0)

    def fail(self, error: Exception) -> None:
        """Tell the supervisor why this script cannot go on."""
        if not self._failed:
            self._failed = True
            with contextlib.suppress(FlockstepError):
                self.member.fail(failure_of(error, self.member.ticket, None))
            self.member.close(0.3)

    def _on_crash(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """The run's own errors are one sentence, which the supervisor prints; others are shown."""
        if isinstance(error, Exception):
            self.fail(error)
        if self._over or not isinstance(error, FlockstepError):  # nobody else would show it
            self._hook(kind, error, trace)
