"""Delays the signals that stop a run until no operation is left incomplete."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

from flockstep.system import STOPS


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
