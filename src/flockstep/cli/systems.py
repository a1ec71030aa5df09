"""`flockstep systems`: prints the table of the literature's systems, or one system in detail."""

from __future__ import annotations

from typing import Any

from rich.markup import escape

from flockstep.cli import show
from flockstep.report.terminal import TableColumn, TextTable
from flockstep.strategies.base import Strategy
from flockstep.systems.catalog import System, system, systems

HEADINGS = ("system", "parallelism", "optimization", "scheduling", "exchange", "topology")


def rows() -> list[dict[str, str]]:
    """Return the rows of the table: every system with its place in the taxonomy, derived from the system's
    composition.
    """
    return [known.row() for known in systems()]


def detail(known: System) -> dict[str, Any]:
    """Print all details of one system of the literature."""
    return {
        **known.row(),
        "citation": known.citation,
        "algorithm": known.algorithm,
        "differs": known.differs,
        "modes": [
            {
                "mode": mode.name,
                "strategy": str(strategy),
                "partition": mode.partition,
                "delivery": strategy.traits.delivery,
            }
            for mode, strategy in ((mode, Strategy.parse(mode.runs)) for mode in known.modes)
        ],
    }


def show_systems(name: str | None, as_json: bool) -> None:
    """Print the table of the literature's systems, or the details of one system."""
    if as_json:
        show.json(rows() if name is None else detail(system(name)))
    elif name is None:
        show.page().print(_table())
    else:
        _print(detail(system(name)))


def _table() -> TextTable:
    ranks = dict(zip(HEADINGS, (0, 4, 3, 2, 0, 1), strict=True))
    columns = [TableColumn(heading, text=True, rank=rank) for heading, rank in ranks.items()]
    return TextTable(columns, [[row[heading] for heading in HEADINGS] for row in rows()])


def _print(found: dict[str, Any]) -> None:
    page = show.page()
    page.print(f"[bold]{escape(found['system'])}[/]")
    for label in ("citation", "algorithm", "differs", *HEADINGS[1:]):
        if found[label]:
            page.print(f"  {label:13} {escape(found[label])}", soft_wrap=True, highlight=False)
    for mode in found["modes"]:
        split = "" if mode["partition"] == "none" else f", --partition '{mode['partition']}'"
        text = escape(mode["strategy"] + split)
        page.print(f"  {mode['mode'] or 'composition':13} {text}", soft_wrap=True, highlight=False)
    if found["modes"]:
        run = f"-s '{found['system']}' -n 4"
        if (first := found["modes"][0])["partition"] != "none":
            run = f"-s '{first['strategy']}' --partition '{first['partition']}' -n 4"
        page.print(f"  {'run it':13} flockstep simulate digits {escape(run)}", highlight=False)
