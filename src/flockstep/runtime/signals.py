"""Leaves the signals that stop a run to the supervisor of the run."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType

from flockstep.system import ENDING, STOPS


def leave_to_supervisor(terminated: Callable[[], None] = lambda: None) -> None:
    """Ignore the signals that stop a run in this process, which was forked with these signals blocked.

    SIGTERM calls `terminated`. Processes that this process starts can still be ended by SIGTERM, as a
    `multiprocessing.Pool` ends its workers.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _ignore(ENDING, terminated)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def leave_script_to_supervisor(terminated: Callable[[], None]) -> None:
    """Ignore SIGTERM and SIGHUP in this process, which runs a user's script, unless the script handles them itself.

    SIGTERM calls `terminated`. Outside of the main thread, in which Python handles signals, nothing changes.
    """
    if threading.current_thread() is threading.main_thread():
        _ignore([one for one in ENDING if signal.getsignal(one) == signal.SIG_DFL], terminated)


def _ignore(signals: Iterable[signal.Signals], terminated: Callable[[], None]) -> None:
    """Ignore signals in this process, but not in processes that are forked from it; SIGTERM calls `terminated`."""
    own = os.getpid()

    def ignore(number: int, frame: FrameType | None) -> None:
        if os.getpid() != own:  # forked so recently that `forked` has not set the default yet
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif number == signal.SIGTERM:
            terminated()

    def forked() -> None:
        # Python runs handlers between two of its own instructions, so a signal that arrives just before a system call
        # begins would not end this process until the call returns; the default action ends the process at once.
        for one in signals:
            if signal.getsignal(one) is ignore:
                signal.signal(one, signal.SIG_DFL)

    for one in signals:
        signal.signal(one, ignore)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=forked)
