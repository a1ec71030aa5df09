"""Reports which workers a run waits for, and ends the run at the user's time limit."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Collection, Iterable

from flockstep.errors import RunError, printable
from flockstep.messages import Fields, node_name

PERIOD = 10.0
"""Seconds of waiting after which a run first reports the workers that it waits for; also the first interval between two
reports.
"""
STARTING = 6
"""Number of periods after which a run reports workers that have not joined, because a script's imports may be slow.
From then on, each interval between two reports is twice the previous one.
"""
STANDSTILL = 6
"""Number of periods after which a run ends if every worker waits and not all of them wait in one call that every rank
must make. `--step-timeout` replaces this limit.
"""
RAREST = 60
"""Maximum interval between two reports of a wait, in periods of `PERIOD` seconds."""
FRESH = 5.0
"""Seconds for which a worker's report that it waits remains valid; a waiting worker repeats the report every second."""

ADVICE = "add --step-timeout SECONDS to end such a run"
SHOWN = 4
"""Maximum number of workers that one sentence names; further workers are only counted."""


def on_stderr(text: str) -> None:
    """Print a line to standard error, if it is open."""
    if sys.stderr is None:
        return
    with contextlib.suppress(OSError, ValueError):  # a full disk, a closed pipe, or a closed file
        sys.stderr.write(f"flockstep: {printable(text)}\n")
        sys.stderr.flush()


class Reminder:
    """Prints what a process waits for, at most once every ten seconds."""

    def __init__(self, say: Callable[[str], None] = on_stderr):
        self._say = say
        self._said = time.monotonic()

    def remind(self, text: str) -> bool:
        """Print what the process waits for if at least ten seconds have passed since the last time; return whether it
        was printed.
        """
        if time.monotonic() - self._said < PERIOD:
            return False
        self._said = time.monotonic()
        self._say(f"waiting for {text}")
        return True


JOINS_SCRIPT = "running the part of the script before flockstep.distribute or flockstep.join"
JOINS_JOB = "importing modules, or making the job's model and data"


class WaitMonitor:
    """Keeps the time of each worker's last step, and the reason that a waiting worker has reported, to find the workers
    for which the run waits.
    """

    def __init__(
        self,
        workers: int,
        limit: float | None = None,
        say: Callable[[str], None] = on_stderr,
        period: float = PERIOD,
        now: Callable[[], float] = time.monotonic,
        joins: str = JOINS_SCRIPT,
        interruption: float = 0.0,
    ):
        """`limit`: seconds that a step, or joining the run, may take before the run ends; None: no limit. `joins`: what
        a worker does before it joins, after "it is still". `interruption`: seconds for which a connection between
        workers may be interrupted while all of them wait.
        """
        self._joins = joins
        self._limit = limit
        self._say = say
        self._period = period
        self._standstill = STANDSTILL * period + interruption
        self._now = now
        self._since = dict.fromkeys(range(workers), now())
        self._steps: dict[int, int] = {}
        self._waiting: dict[int, tuple[float, str, str]] = {}
        """Worker → time of its last report that it waits, what it waits for, and the call that every rank must make in
        which it waits; no name if it waits elsewhere.
        """
        self._said = now()
        self._interval = period
        """Seconds between the last report and the next one."""
        self._stepping = True

    def begin(self, stepping: bool = True) -> None:
        """Start the run's clock. If `stepping` is false, there is no strategy, so that workers take no steps and no
        time limit applies.
        """
        self._stepping = stepping
        self._since = dict.fromkeys(self._since, self._now())

    def hear(self, rank: int, note: Fields) -> None:
        """Handle a worker's step, or its report of the reason for which it waits."""
        self._steps[rank] = int(note["step"])
        if "for" in note:
            self._waiting[rank] = self._now(), str(note["for"]), str(note.get("together", ""))
        else:
            self._since[rank] = self._now()
            self._waiting.pop(rank, None)

    def note_sign(self, rank: int) -> None:
        """Record that a worker took a step in a later call to `distribute`, which shows that it does not hang."""
        self._since[rank] = self._now()

    def look(self, joined: Collection[int], ended: Collection[int], lost: Collection[int] = ()) -> None:
        """Report the workers that the run waits for, if a report is due; those in `ended` include those in `lost`.

        Raises:
            RunError: the run has waited for longer than its limit, or its workers wait for one another.
        """
        now = self._now()
        there = [rank for rank in self._since if rank not in ended]
        waiting = [r for r in there if r in self._waiting and now - self._waiting[r][0] < FRESH]
        patience = self._period if self._limit is None else min(self._period, self._limit)
        late = [r for r in there if r not in waiting and now - self._last_sign(r) >= patience]
        longest = max((now - self._last_sign(r) for r in late), default=0.0)
        stuck = waiting == there
        if stuck:  # the run stands still since the last step of any of them
            longest = min((now - self._since[r] for r in there), default=0.0)
            late = there if longest >= patience else []
        if longest < STARTING * self._period:
            self._interval = self._period
        if not late:
            return
        sentence = self._sentence(late, [r for r in waiting if r not in late], joined, longest, stuck)
        apart = self._apart(late, set(ended).difference(lost)) if stuck else ""
        if apart and self._limit is None and longest >= self._standstill:
            over = joined_and(node_name(rank) for rank in sorted(set(ended).difference(lost)))
            rest = f"{over} took its last step; " if over else ""
            raise RunError(f"{sentence}; {rest}call {apart}() on every rank, or on none")
        limited = self._stepping or any(rank not in joined for rank in late)
        if limited and self._limit is not None and longest >= self._limit:
            raise RunError(
                f"{sentence}; this exceeds --step-timeout {self._limit:g}: fix the cause of the wait, or raise the "
                "limit"
            )
        if self._is_awaited(late, waiting, joined, ended) and min(longest, now - self._said) >= self._interval:
            self._said = now
            if longest >= STARTING * self._period:
                self._interval = min(2 * self._interval, RAREST * self._period)
            end = f"the run ends after {self._standstill:g} s of this" if apart and self._limit is None else ADVICE
            self._say(f"{sentence}; {end}")

    def _last_sign(self, rank: int) -> float:
        """Time of a worker's last step, or of its last report that it waited, whichever is later."""
        return max(self._since[rank], self._waiting.get(rank, (0.0, "", ""))[0])

    def _apart(self, waiting: list[int], ended: Collection[int]) -> str:
        """The call in which some of the workers, all of which wait, wait for others that will never make the call:
        these wait elsewhere, or have ended. Empty if there is no such call.
        """
        calls = {self._waiting[rank][2] for rank in waiting} | ({"finish"} if ended else set())
        return next(iter(sorted(calls - {"", "finish"})), "") if len(calls) > 1 else ""

    def _is_awaited(self, late: list[int], waiting: list[int], joined: Collection[int], ended: Collection[int]) -> bool:
        """Whether any worker is known to wait for the late workers."""
        if any(rank not in joined for rank in late):
            starting = self._now() - min(self._since[rank] for rank in late) < STARTING * self._period
            return len(self._since) > 1 and not starting
        # Ended workers wait for the others only if the run takes steps; users of a communicator do not wait.
        return bool(waiting) or (any(self._steps.values()) and bool(ended))

    def _sentence(
        self, late: list[int], waiting: list[int], joined: Collection[int], seconds: float, stuck: bool
    ) -> str:
        """Sentence about the late workers, their steps, and what the other workers wait for."""
        missing = [rank for rank in late if rank not in joined]
        if missing:
            have, are = ("has", "it is") if len(missing) == 1 else ("have", "they are")
            names = joined_and(map(node_name, missing))
            return f"{names} {have} not joined the run after {seconds:.0f} s: {are} still {self._joins}"
        if stuck:
            return f"every worker has waited for {seconds:.0f} s: {'; '.join(self._held(late))}"
        names = joined_and(f"{node_name(r)} (after step {self._steps.get(r, 0)})" for r in late)
        return "; ".join([f"waiting for {names}: no step for {seconds:.0f} s", *self._held(waiting)])

    def _held(self, ranks: list[int]) -> list[str]:
        first = {self._waiting[rank][2]: rank for rank in reversed(ranks)}  # one worker of each call is shown
        shown = sorted(sorted(ranks, key=lambda rank: (rank not in first.values(), rank))[:SHOWN])
        return [f"{node_name(r)} at step {self._steps.get(r, 0)} waits for {self._waiting[r][1]}" for r in shown]


def joined_and(names: Iterable[str]) -> str:
    """Return the names joined for a sentence: at most `SHOWN` names, then the number of further names."""
    found = list(names)
    shown = found[:SHOWN] + ([f"{len(found) - SHOWN} more"] if len(found) > SHOWN else [])
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
