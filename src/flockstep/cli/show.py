"""Writes progress, with the time left, to standard error, and tables and JSON to standard output."""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console

from flockstep.errors import printable
from flockstep.report.progress import ProgressCallback

if TYPE_CHECKING:
    from rich.live import Live
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text

    from flockstep.launchers.output import Sink
    from flockstep.launchers.peers import RunPeer
    from flockstep.messages import Address
    from flockstep.report.terminal import TextTable


class _Page(Console):
    """A console that shows the control characters of texts, which may come from a record."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(printable(one) if isinstance(one, str) else one for one in objects), **options)


console: Console = _Page(stderr=True)


def page() -> Console:
    """Return a console on standard output, as wide as the terminal or COLUMNS, otherwise 120 characters."""
    known = Console().is_terminal or os.environ.get("COLUMNS", "").isdigit()
    return _Page(width=None if known else 120)


def note(text: str) -> None:
    """Print a text on standard error as it is, beside what a command prints on standard output."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def json(value: object) -> None:
    """Print one JSON document on standard output."""
    import msgspec

    print(msgspec.json.encode(value).decode())


def result(as_json: bool, document: object, *parts: TextTable | Text | str) -> None:
    """Print the result of a command on standard output: one JSON document, or else tables and sentences."""
    if as_json:
        json(document)
        return
    console = page()
    for part in parts:
        console.print(part, highlight=False, markup=False)


PERIOD = 10.0
"""Seconds between two lines of progress if standard error is not a terminal."""
BAR = 16
"""Width of a progress bar in columns of the terminal."""
SHOWN = 16
"""Largest number of workers in the live table; the remaining workers are only counted."""
REDRAWS = 0.1
"""Longest time in seconds for which lines of output are held back, so that many lines redraw the table only once."""
MOST_HELD = 1 << 18
"""Number of held-back bytes above which the script waits until the terminal has shown its output."""


@contextmanager
def standings(title: str) -> Iterator[Callable[[dict[Address, RunPeer], int], object]]:
    """Context manager that shows a live table of a run's nodes, and the time left; without a terminal, lines."""

    def mean_step(nodes: dict[Address, RunPeer]) -> float:
        return statistics.fmean(one.step for address, one in nodes.items() if address >= 0)

    if not console.is_terminal:
        with status(title, "steps") as say:
            yield lambda nodes, steps: say(title, mean_step(nodes), steps)
        return
    from rich.console import Group
    from rich.live import Live

    progress = _progress("steps")
    task = progress.add_task(title, total=None)
    with Live(console=console, refresh_per_second=4, transient=True) as live:

        def show(nodes: dict[Address, RunPeer], steps: int) -> None:
            progress.update(task, completed=int(mean_step(nodes)), total=steps or None)  # a script does not tell them
            live.update(Group(progress, node_table(nodes)))

        yield show


@contextmanager
def status(title: str = "starting", unit: str = "") -> Iterator[ProgressCallback]:
    """Context manager that shows the current task, and the time left if the number of units is known."""
    if console.is_terminal:
        with _progress(unit) as progress:
            shown = progress.add_task(title, total=None)
            yield lambda what, done=0, total=0: progress.update(
                shown, description=what, completed=int(done), total=int(total) or None
            )
        return
    from flockstep.launchers.wait_monitor import on_stderr

    task, over, began = "starting", threading.Event(), time.monotonic()

    def print_often() -> None:
        while not over.wait(PERIOD):
            on_stderr(f"{task}; {time.monotonic() - began:.0f} s so far")

    def say(what: str, done: float = 0, total: float = 0) -> None:
        nonlocal task
        task = (f"{unit} of " if unit else "") + what + (f", {done:.0f} of {total:.0f}" if total else "")

    printing = threading.Thread(target=print_often, daemon=True)
    printing.start()
    try:
        yield say
    finally:
        over.set()
        printing.join()


@contextmanager
def bar(title: str) -> Iterator[Callable[[int, int, float], None]]:
    """Context manager that shows a progress bar of a simulation's worker-steps, and the time left."""
    with status(title, "worker-steps") as say:

        def show(done: int, total: int, clock: float) -> None:
            if done % max(1, total // 200) == 0 or done == total:  # about 200 times in a simulation
                say(f"{title}, virtual {clock:.3g} s", done, total)

        yield show


def _progress(unit: str = "") -> Progress:
    """A bar with the number of parts done, all parts, the time left, and what goes on."""
    from datetime import timedelta

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.table import Column
    from rich.text import Text

    class TimeLeft(ProgressColumn):
        """Time until the end, once it can be estimated."""

        def render(self, task: Task) -> Text:
            seconds = None if task.total is None else task.time_remaining
            return Text(
                "" if seconds is None else f"{timedelta(seconds=int(seconds))} left", style="progress.remaining"
            )

    text = TextColumn(
        "{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
    )
    units = (TextColumn(unit),) if unit else ()
    columns = (BarColumn(bar_width=BAR), MofNCompleteColumn(), *units, TimeLeft(), text)
    return Progress(*columns, console=console, transient=True, expand=True)


def node_table(nodes: dict[Address, RunPeer]) -> Table:
    """Return a table of the state of every node of a run, with losses if any is known."""
    from rich.table import Table

    from flockstep.messages import node_name

    table = Table()
    known = any(one.loss is not None for one in nodes.values())
    for heading in ("node", "state", "step", *(["loss"] if known else [])):
        table.add_column(heading, justify="left" if heading in ("node", "state") else "right")
    for address in sorted(nodes, key=lambda a: (a < 0, abs(a)))[:SHOWN]:
        one = nodes[address]
        losses = ["" if one.loss is None else f"{one.loss:.4f}"] if known else []
        table.add_row(node_name(address), one.state, str(one.step) if address >= 0 else "", *losses)
    if len(nodes) > SHOWN:
        table.add_row(f"… {len(nodes) - SHOWN} more")
    return table


@contextmanager
def beside_scripts() -> Iterator[tuple[Callable[[dict[Address, RunPeer], int], None], Sink]]:
    """Context manager that yields two functions: one shows the nodes of a run, the other prints the output of scripts.

    Without a terminal, only output is printed.

    The table disappears as soon as a script prints a carriage return, as progress bars do; otherwise the table and the
    progress bar would overwrite each other.
    """
    from flockstep.launchers.output import to_terminal

    if not console.is_terminal:
        yield lambda nodes, steps: None, to_terminal
        return
    from rich.live import Live

    with Live(console=console, refresh_per_second=4, transient=True) as live:
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

    def show(self, nodes: dict[Address, RunPeer], steps: int) -> None:
        """Show the state of every node."""
        if not self._stopped.is_set():
            self._live.update(node_table(nodes))

    def take(self, stream: int, data: bytes) -> None:
        """Show whole lines above the table."""
        from flockstep.launchers.output import OUT, to_terminal

        if b"\r" in data.replace(b"\r\n", b"\n"):
            self.stop()
        with self._lock:
            if self._stopped.is_set() or (stream == OUT and not sys.stdout.isatty()):
                to_terminal(stream, data)
            else:
                self._waiting += data
            if len(self._waiting) >= MOST_HELD:
                self._flush()

    def flush_often(self) -> None:
        """Show waiting lines every `REDRAWS` seconds, until the table goes."""
        while not self._stopped.wait(REDRAWS):
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
            console.print(Text.from_ansi(text), soft_wrap=True)
