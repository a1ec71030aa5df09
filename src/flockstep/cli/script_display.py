"""Shows the output of a run's scripts on a terminal, above a live table of the run's nodes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from flockstep.cli import show
from flockstep.launchers.output import OUT, Sink, to_terminal

if TYPE_CHECKING:
    from rich.live import Live

    from flockstep.launchers.node_progress import NodeProgress
    from flockstep.messages import Address

PERIOD = 0.1
"""Longest time in seconds for which lines of output are held back, so that many lines redraw the table only once."""
MOST = 1 << 18
"""Number of held-back bytes above which the script waits until the terminal has shown its output."""


@contextmanager
def beside_scripts() -> Iterator[tuple[Callable[[dict[Address, NodeProgress]], None], Sink]]:
    """Context manager that yields two functions: one shows the nodes of a run, the other prints the output of scripts.

    Without a terminal, only output is printed.

    The table disappears as soon as a script prints a carriage return, as progress bars do; otherwise the table and the
    progress bar would overwrite each other.
    """
    if not show.console.is_terminal:
        yield lambda nodes: None, to_terminal
        return
    from rich.live import Live

    with Live(console=show.console, refresh_per_second=4, transient=True) as live:
        display = _ScriptDisplay(live)
        flushing = threading.Thread(target=display.flush_often, daemon=True)
        flushing.start()
        try:
            yield display.show, display.take
        finally:
            display.stop()
            flushing.join()


class _ScriptDisplay:
    def __init__(self, live: Live):
        self._live = live
        self._lock = threading.Lock()
        self._waiting = bytearray()
        self._stopped = threading.Event()

    def show(self, nodes: dict[Address, NodeProgress]) -> None:
        """Show the state of every node."""
        if not self._stopped.is_set():
            self._live.update(show.node_table(nodes))

    def take(self, stream: int, data: bytes) -> None:
        """Show whole lines above the table."""
        if b"\r" in data.replace(b"\r\n", b"\n"):
            self.stop()
        with self._lock:
            if self._stopped.is_set() or (stream == OUT and not sys.stdout.isatty()):
                to_terminal(stream, data)
            else:
                self._waiting += data
            if len(self._waiting) >= MOST:
                self._flush()

    def flush_often(self) -> None:
        """Show waiting lines every `PERIOD`, until the table goes."""
        while not self._stopped.wait(PERIOD):
            with self._lock:
                self._flush()

    def stop(self) -> None:
        """Show what waits, and remove the table."""
        with self._lock:
            if not self._stopped.is_set():
                self._flush()
                self._stopped.set()
                self._live.stop()

    def _flush(self) -> None:
        from rich.text import Text

        if self._waiting:
            text = self._waiting.decode(errors="replace").removesuffix("\n")
            self._waiting.clear()
            show.console.print(Text.from_ansi(text), soft_wrap=True)
