"""Signals that stop a run strike where nothing is left half done."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Context manager that delays the signals that stop a run until its end, where the first of them takes effect."""
    if threading.current_thread() is not threading.main_thread():  # signals are handled in the main thread
        yield
        return
    held: list[int] = []
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {one: signal.signal(one, lambda number, frame: held.append(number)) for one in stops}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, signal.SIG_DFL if handler is None else handler)
        if held:
            signal.raise_signal(held[0])
