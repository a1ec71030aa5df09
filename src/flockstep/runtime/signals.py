"""Leaves the signals that stop a run to the supervisor of the run."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from flockstep.system import ENDING, STOPS

Handler = Callable[[int, FrameType | None], None]


def leave_to_supervisor(terminated: Callable[[], None] = lambda: None) -> None:
    """Ignore the signals that stop a run in this process, which was forked with these signals blocked.

    SIGTERM calls `terminated`. Processes that this process starts can still be ended by SIGTERM, as a
    `multiprocessing.Pool` ends its workers.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for one in ENDING:
        signal.signal(one, _ignoring(terminated))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def leave_script_to_supervisor(terminated: Callable[[], None]) -> None:
    """Ignore SIGTERM and SIGHUP in this process, which runs a user's script, unless the script handles them itself.

    SIGTERM calls `terminated`. Outside of the main thread, in which Python handles signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for one in ENDING:
        if signal.getsignal(one) == signal.SIG_DFL:
            signal.signal(one, _ignoring(terminated))


def _ignoring(terminated: Callable[[], None]) -> Handler:
    """Return a handler that ignores a signal in this process, but not in processes that are forked from it."""
    own = os.getpid()

    def ignore(number: int, frame: FrameType | None) -> None:
        if os.getpid() != own:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif number == signal.SIGTERM:
            terminated()

    return ignore
