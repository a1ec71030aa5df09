"""Delays the signals that stop a run until no operation is left incomplete."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that stop a run; only the supervisor handles them, even if they are sent to all processes of the run."""


def leave_to_supervisor(terminated: Callable[[], None] = lambda: None) -> None:
    """Ignore the signals that stop a run in this process, which was forked with these signals blocked.

    SIGTERM calls `terminated`. Processes that this process starts can still be ended by SIGTERM, as a
    `multiprocessing.Pool` ends its workers.
    """
    own = os.getpid()

    def ignore(number: int, frame: FrameType | None) -> None:
        if os.getpid() != own:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif number == signal.SIGTERM:
            terminated()

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for one in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, ignore)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Context manager that delays the signals that stop a run; at its end, the first signal that arrived meanwhile
    takes effect.
    """
    if threading.current_thread() is not threading.main_thread():  # signals are handled in the main thread
        yield
        return
    held: list[int] = []
    before = {one: signal.signal(one, lambda number, frame: held.append(number)) for one in STOPS}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, signal.SIG_DFL if handler is None else handler)
        if held:
            signal.raise_signal(held[0])
