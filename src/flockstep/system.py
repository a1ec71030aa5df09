"""What only some operating systems have, each with a plain way for the others.

Simulations, comparisons of them, plans and reports run wherever Python runs; runs on real processes need Linux.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import IO

HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)
"""Signal that the terminal has closed; None on a system without terminals that close."""
ENDING = tuple(one for one in (signal.SIGTERM, HANGUP) if one is not None)
"""Signals that end a process which does not handle them, unlike SIGINT, which Python raises as an exception."""
STOPS = (signal.SIGINT, *ENDING)
"""Signals that stop a run; only the supervisor handles them, even if they are sent to all processes of the run."""


def cores() -> int:
    """Return the number of processor cores that this process may use; all where the system sets no limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def lock(file: int | IO[str], shared: bool = False) -> None:
    """Lock an open file, until it is closed or the process dies; with `shared`, against those that lock it alone.

    Nothing is locked on a system without such locks.

    Raises:
        BlockingIOError: another process holds the lock.
    """
    with contextlib.suppress(ImportError):
        import fcntl

        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)


def is_own(found: os.stat_result) -> bool:
    """Return whether a file or folder belongs to this user; True on a system without owners."""
    return not hasattr(os, "getuid") or found.st_uid == os.getuid()


def is_open(found: os.stat_result) -> bool:
    """Return whether other users may read or enter a file or folder; False on a system without such modes."""
    return hasattr(os, "getuid") and bool(found.st_mode & 0o077)


def set_mode(descriptor: int, mode: int) -> None:
    """Set who may read and write an open file, on a system that has such modes.

    Raises:
        PermissionError: the file is another user's.
    """
    if hasattr(os, "fchmod"):
        os.fchmod(descriptor, mode)
