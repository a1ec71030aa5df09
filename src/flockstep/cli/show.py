"""Progress on standard error: every worker of a real run, one bar for a simulated one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from rich.table import Table

    from flockstep.launchers.standing import Standing
    from flockstep.messages import Address

console = Console(stderr=True)


def page() -> Console:
    """Where tables are printed: as wide as the terminal, or wide enough for a ranked table where there is none."""
    return Console(width=None if Console().is_terminal else 120)


def json(value: object) -> None:
    """One JSON document on standard output."""
    import msgspec

    print(msgspec.json.encode(value).decode())


SHOWN = 16
"""Workers in the live table; more are counted."""


@contextmanager
def standings(title: str) -> Iterator[Callable[[dict[Address, Standing]], None]]:
    """A live table of the nodes of a real run; nothing where nobody watches."""
    if not console.is_terminal:
        yield lambda nodes: None
        return
    from rich.live import Live

    with Live(console=console, refresh_per_second=4, transient=True) as live:

        def show(nodes: dict[Address, Standing]) -> None:
            live.update(_table(title, nodes))

        yield show


@contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """Says what goes on; nothing where nobody watches."""
    if not console.is_terminal:
        yield lambda what: None
        return
    with console.status("starting") as shown:
        yield shown.update


@contextmanager
def bar(title: str) -> Iterator[Callable[[int, int, float], None]]:
    """A bar for the worker-steps of a simulation; nothing where nobody watches."""
    if not console.is_terminal:
        yield lambda done, total, clock: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("worker-steps, virtual {task.fields[clock]:.3g} s"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=None, clock=0.0)

        def show(done: int, total: int, clock: float) -> None:
            if done % max(1, total // 200) == 0 or done == total:
                progress.update(task, completed=done, total=total, clock=clock)

        yield show


def _table(title: str, nodes: dict[Address, Standing]) -> Table:
    from rich.table import Table

    from flockstep.messages import node_name

    table = Table(title=title)
    for heading in ("node", "state", "step", "loss"):
        table.add_column(heading, justify="left" if heading in ("node", "state") else "right")
    for address in sorted(nodes, key=lambda a: (a < 0, abs(a)))[:SHOWN]:
        one = nodes[address]
        loss = "" if one.loss is None else f"{one.loss:.4f}"
        table.add_row(node_name(address), one.state, str(one.step) if address >= 0 else "", loss)
    if len(nodes) > SHOWN:
        table.add_row(f"… {len(nodes) - SHOWN} more", "", "", "")
    return table
