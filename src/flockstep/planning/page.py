"""A plan as one self-contained page: advice, scaling curves, a map of what is best, and the tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flockstep.planning.advice import Advice, slower
from flockstep.planning.plan import KEEN, Outlook
from flockstep.planning.prospect import faster
from flockstep.planning.scaling import Contender, best
from flockstep.planning.words import (
    HEADINGS,
    LITTLE,
    TABLE_2,
    cells,
    many,
    row_of_table_2,
    ruled_out,
    scaling,
    short,
    unplanned,
    worth_of,
)
from flockstep.report.layers import amount
from flockstep.report.layouts import speed
from flockstep.report.page import Drawing, Listing, Page
from flockstep.report.style import COLOURS, INK, Figure, axis, decades, layout, safe
from flockstep.report.words import number

CELLS = 13
"""Of the map, in each direction."""
RANGE = 100.0
"""How far bandwidth and model size go, up and down."""


def write_plan(outlook: Outlook, advice: Advice, path: Path | str, further: Sequence[Listing] = ()) -> Path:
    """Write the page to `path` and return it; the folder is made if need be. `further`: tables that come first."""
    return plan_page(outlook, advice, further).write(path)


def plan_page(outlook: Outlook, advice: Advice, further: Sequence[Listing] = ()) -> Page:
    """Advice, pictures, and everything in them as tables too."""
    ranked = advice.ranked(outlook)
    marked = {place: "chosen" for place, one in enumerate(ranked) if one is advice.choice}
    rows = [cells(outlook, one, advice.worths[one.name]) for one in ranked]
    listings = [
        *further,
        Listing("Predictions", PREDICTED, HEADINGS, rows, marked),
        Listing("Criteria", GRADED, TABLE_2, [row_of_table_2(outlook, one) for one in ranked], marked),
    ]
    drawings = []
    if outlook.curves:
        drawings.append(Drawing("scaling", "How it scales", SCALING, scaling_picture(outlook)))
        listings.append(scaling_table(outlook))
    if outlook.workers > 1 and math.isfinite(outlook.site.link[1]) and (best_there := best_map(outlook, advice)):
        drawings.append(Drawing("map", "Where what is best", MAP, best_there.picture(outlook)))
        listings.append(best_there.table())
    return Page(
        brand="flockstep plan",
        title=f"{outlook.task.name} on {many(outlook.workers, 'worker')} of {outlook.site.cluster.name}",
        footer="Predictions, not measurements. MB = 1,000,000 bytes.",
        sentences=advice.sentences,
        lists=(
            ("Why", advice.reasons),
            ("What would change this", advice.changes),
            ("Ruled out", ruled_out(advice.excluded)),
            ("Scaling", scaling(outlook.curves, advice.excluded)),
            ("Not in these figures", [*outlook.left_out, *unplanned(outlook)]),
        ),
        drawings=drawings,
        listings=listings,
    )


_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")
_DASHES = ("solid", "dot", "dashdot")
PREDICTED = (
    "Worth: how many times as quickly as one worker it is taken to advance, that is samples per second over how many "
    "of them do the work of one of plain training; the most first, also where something is ruled out. Samples per "
    "second of all workers; seconds between two gradients of a worker; the share of them that it computes; bytes that "
    "a worker sends in a step, and that pass the busiest server; versions by which an update is late, on average and "
    "at most; memory on a worker; from a rehearsal with all workers or with fewer. The row in green is what is advised."
)
GRADED = (
    "Table 2 of Langer et al. (2020), computed: whether the workers' data have to be alike, whether the best learning "
    "rate is higher or lower than one worker's, versions by which updates are late, hyper-parameters that the strategy "
    "adds, how much of the slowest worker's delay everyone takes on (over 100 %: it reaches into later steps), "
    "whether the others go on when a worker is gone, how hard it is to get the same result again, and departures from "
    "plain training."
)
SCALING = (
    "Worth over workers: how many times as quickly as one worker a strategy is taken to advance, from rehearsals: "
    "constant times, and on top what the slowest worker costs. The thick dashed line: one worker alone."
)
MAP = (
    "The strategy that is worth most among those that meet the needs and fit in memory here, by samples per second in "
    "terms of plain training, over bandwidth and parameters; the work of a gradient stays the same. The letters are "
    "in the legend. The cross: this cluster and model."
)


def scaling_picture(outlook: Outlook) -> Figure:
    """A line for each strategy."""
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": safe(short(one.name)),
            "x": one.workers,
            "y": one.worths,
            "line": {"color": COLOURS[place % len(COLOURS)], "dash": _DASHES[place % len(_DASHES)]},
            "marker": {"symbol": _SYMBOLS[place % len(_SYMBOLS)], "size": 8},
            "hovertemplate": "workers %{x}: worth %{y:.3g}<extra>" + safe(short(one.name)) + "</extra>",
        }
        for place, one in enumerate(outlook.curves)
    ]
    largest = max(max(one.workers) for one in outlook.curves)
    data.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "one worker",
            "x": [1, largest],
            "y": [1, 1],
            "line": {"color": "#3d4f66", "width": 3, "dash": "dash"},
        }
    )
    sizes = sorted({n for one in outlook.curves for n in one.workers})
    across = axis("workers", type="log", tickvals=sizes, ticktext=[f"{n:,}" for n in sizes])
    worths = [max(worth, LITTLE) for one in outlook.curves for worth in one.worths]
    up = axis("times as quickly as one worker", type="log", **decades([1, *worths], number))
    legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}
    return {"data": data, "layout": layout(520, xaxis=across, yaxis=up, hovermode="closest", legend=legend)}


def scaling_table(outlook: Outlook) -> Listing:
    """The same in figures."""
    sizes = sorted({n for one in outlook.curves for n in one.workers})
    rows = []
    for one in outlook.curves:
        known = dict(zip(one.workers, one.worths, strict=True))
        rows.append((short(one.name), *(worth_of(known.get(n)) for n in sizes)))
    headings = ("strategy", *(f"{n:,}" for n in sizes))
    return Listing("How it scales, in figures", "Worth over workers.", headings, rows)


@dataclass(frozen=True)
class Map:
    """Bandwidth × model size → the best strategy."""

    bandwidths: tuple[float, ...]
    """Bytes per second, ascending."""
    sizes: tuple[float, ...]
    """Parameters, ascending."""
    names: tuple[tuple[str, ...], ...]
    """A row for each size, a column for each bandwidth."""

    @property
    def kinds(self) -> list[str]:
        """All names, in the order in which they get their letters."""
        return list(dict.fromkeys(name for row in self.names for name in row))

    def letter(self, name: str) -> str:
        """A, B, C and so on."""
        return chr(ord("A") + self.kinds.index(name))

    @property
    def key(self) -> str:
        """What the letters mean."""
        meant = "; ".join(f"{self.letter(name)}: {short(name)}" for name in self.kinds)
        return f"Parameters over the bandwidth of the slowest link. {meant}."

    def table(self) -> Listing:
        """In letters, the largest model first as in the picture."""
        rows = [(amount(size), *map(self.letter, row)) for size, row in zip(self.sizes, self.names, strict=True)]
        headings = ("parameters", *map(speed, self.bandwidths))
        return Listing("Where what is best, in letters", self.key, headings, rows[::-1])

    def picture(self, outlook: Outlook) -> Figure:
        """A coloured cell with a letter for each point."""
        kinds, count = self.kinds, len(self.kinds)
        colours = [COLOURS[place % len(COLOURS)] for place in range(count)]
        heat = {
            "type": "heatmap",
            "x": self.bandwidths,
            "y": self.sizes,
            "z": [[kinds.index(name) for name in row] for row in self.names],
            "text": [[self.letter(name) for name in row] for row in self.names],
            "texttemplate": "%{text}",
            "textfont": {"size": 12, "color": "#ffffff"},
            "customdata": [
                [
                    f"{speed(x)}, {amount(y)} parameters: {safe(short(name))}"
                    for x, name in zip(self.bandwidths, row, strict=True)
                ]
                for y, row in zip(self.sizes, self.names, strict=True)
            ],
            "zmin": -0.5,
            "zmax": count - 0.5,
            "colorscale": [[(place + end) / count, colour] for place, colour in enumerate(colours) for end in (0, 1)],
            "showscale": False,
            "xgap": 1,
            "ygap": 1,
            "hovertemplate": "%{customdata}<extra></extra>",
        }
        keys = [
            _mark(f"{self.letter(kind)}: {short(kind)}", None, None, colour, "square")
            for kind, colour in zip(kinds, colours, strict=True)
        ]
        here = _mark("this cluster and model", outlook.site.link[1], outlook.site.task.elements, INK, "x")
        across = axis("bandwidth of the slowest link", type="log", **decades(self.bandwidths, speed, 1 / 8))
        up = axis("parameters", type="log", **decades(self.sizes, amount))
        legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}
        return {
            "data": [heat, *keys, here],
            "layout": layout(560, xaxis=across, yaxis=up, hovermode="closest", legend=legend),
        }


def best_map(outlook: Outlook, advice: Advice) -> Map | None:
    """What is best around this cluster and model, of what meets the needs; None where nothing does."""
    site, rivals = outlook.site, _rivals(outlook, advice)
    if not rivals:
        return None
    factors = [RANGE ** (2 * i / (CELLS - 1) - 1) for i in range(CELLS)]

    def there(size: float, quick: float) -> str:
        moved = replace(site, task=site.task.scaled(size), cluster=faster(site.cluster, quick))
        return best(rivals, moved, outlook.workers, slower=slower(advice.needs))

    return Map(
        tuple(site.link[1] * one for one in factors),
        tuple(site.task.elements * one for one in factors),
        tuple(tuple(there(size, quick) for quick in factors) for size in factors),
    )


def _rivals(outlook: Outlook, advice: Advice) -> list[Contender]:
    """Those that meet the needs and are worth most here, and one worker if it does."""
    out = {name for name, _ in advice.excluded}
    left = [one for one in outlook.contenders if one.name not in out]
    left.sort(key=lambda one: -advice.worths[one.name])
    return [one for one in left if one.pace is not None][:KEEN] + [one for one in left if one.pace is None]


def _mark(name: str, x: float | None, y: float | None, colour: str, symbol: str) -> dict[str, Any]:
    marker = {"color": colour, "symbol": symbol, "size": 12}
    return {"type": "scatter", "mode": "markers", "name": safe(name), "x": [x], "y": [y], "marker": marker}
