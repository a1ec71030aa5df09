"""Whom a run waits for: said every ten seconds, and ended where the user has set a limit."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Collection, Iterable

from flockstep.errors import RunError
from flockstep.messages import Fields, node_name

PERIOD = 10.0
"""Seconds of waiting after which a run says for whom it waits, and again after as many."""
STARTING = 3
"""Periods after which a run says that nobody at all has joined: scripts that still import are no sign of a fault."""
FRESH = 5.0
"""Seconds for which a worker's word that it waits for something holds; it is repeated every second."""

SHOWN = 4
"""Workers that a sentence names; more are counted."""


def on_stderr(text: str) -> None:
    """Print a line for the user, if there is a terminal or a file to print to."""
    if sys.stderr is None:
        return
    with contextlib.suppress(OSError, ValueError):  # a full disk, a reader that has left; a file that was closed
        sys.stderr.write(f"flockstep: {text}\n")
        sys.stderr.flush()


class Waits:
    """Knows of each worker when it took its last step, and what it waits for if it does."""

    def __init__(
        self,
        workers: int,
        limit: float | None = None,
        say: Callable[[str], None] = on_stderr,
        period: float = PERIOD,
        now: Callable[[], float] = time.monotonic,
    ):
        """`limit`: seconds that a step may take, or joining the run, before the run ends; None: as long as it likes."""
        self._limit = limit
        self._say = say
        self._period = period
        self._now = now
        self._since = dict.fromkeys(range(workers), now())
        self._steps: dict[int, int] = {}
        self._waiting: dict[int, tuple[float, str]] = {}
        self._said = now()
        self._stepping = True

    def begin(self, stepping: bool = True) -> None:
        """The clock of the run starts now; workers that follow no strategy take no steps, which have no limit then."""
        self._stepping = stepping
        self._since = dict.fromkeys(self._since, self._now())

    def hear(self, rank: int, note: Fields) -> None:
        """A worker has taken a step, or says `for` what it waits."""
        self._steps[rank] = int(note["step"])
        if "for" in note:
            self._waiting[rank] = self._now(), str(note["for"])
        else:
            self._since[rank] = self._now()
            self._waiting.pop(rank, None)

    def look(self, joined: Collection[int], ended: Collection[int]) -> None:
        """Say for whom the run waits, if it is time to.

        Raises:
            RunError: the run has waited for longer than its limit.
        """
        now = self._now()
        there = [rank for rank in self._since if rank not in ended]
        waiting = [r for r in there if r in self._waiting and now - self._waiting[r][0] < FRESH]
        patience = self._period if self._limit is None else min(self._period, self._limit)
        behind = [r for r in there if r not in waiting] or waiting
        late = [r for r in behind if now - self._since[r] >= patience]
        if not late:
            return
        longest = max(now - self._since[r] for r in late)
        told = self._told(late, [r for r in waiting if r not in late], joined, longest)
        limited = self._stepping or any(rank not in joined for rank in late)
        if limited and self._limit is not None and longest >= self._limit:
            raise RunError(
                f"{told}; that is longer than --step-timeout {self._limit:g}: mend what hangs, or allow more"
            )
        if self._is_awaited(late, waiting, joined, ended) and min(longest, now - self._said) >= self._period:
            self._said = now
            self._say(f"{told}; --step-timeout SECONDS ends such a run")

    def _is_awaited(self, late: list[int], waiting: list[int], joined: Collection[int], ended: Collection[int]) -> bool:
        """Whether anybody is known to wait for those that are late."""
        if any(rank not in joined for rank in late):
            starting = not joined and self._now() - min(self._since.values()) < STARTING * self._period
            return len(self._since) > 1 and not starting
        # Workers that have ended wait for the others only where steps are taken: a communicator's do not.
        return bool(waiting) or (any(self._steps.values()) and bool(ended))

    def _told(self, late: list[int], waiting: list[int], joined: Collection[int], seconds: float) -> str:
        """For whom the run waits, at what, and what the others wait for."""
        missing = [rank for rank in late if rank not in joined]
        if missing:
            return (
                f"waiting for {_and(map(node_name, missing))} to join the run for {seconds:.0f} s (a script joins it "
                "by calling flockstep.distribute or flockstep.join)"
            )
        if all(rank in self._waiting for rank in late):
            return f"every worker has waited for {seconds:.0f} s: {'; '.join(self._held(late))}"
        names = _and(f"{node_name(r)} (after step {self._steps.get(r, 0)})" for r in late)
        return "; ".join([f"waiting for {names}: no step for {seconds:.0f} s", *self._held(waiting)])

    def _held(self, ranks: list[int]) -> list[str]:
        return [
            f"{node_name(r)} at step {self._steps.get(r, 0)} waits for {self._waiting[r][1]}" for r in ranks[:SHOWN]
        ]


def _and(names: Iterable[str]) -> str:
    found = list(names)
    more = [f"{len(found) - SHOWN} more"] if len(found) > SHOWN else []
    return " and ".join([*found[:SHOWN], *more])
