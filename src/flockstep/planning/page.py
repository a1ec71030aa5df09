"""Writes a plan as a self-contained HTML page: advice, scaling curves, a map of the best strategies, and tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flockstep.planning.advice import Advice, slower
from flockstep.planning.criteria import MARGIN
from flockstep.planning.plan import BEST_SHOWN, Outlook
from flockstep.planning.plan_text import (
    HEADINGS,
    LITTLE,
    TABLE_2,
    cells,
    many,
    row_of_table_2,
    ruled_out,
    scaling,
    short,
    speedup_of,
    unplanned,
)
from flockstep.planning.scaling import ScalablePrediction, best
from flockstep.planning.step_prediction import faster
from flockstep.report.formatting import number
from flockstep.report.layers import amount
from flockstep.report.layouts import speed
from flockstep.report.page import Drawing, Listing, Page
from flockstep.report.style import COLORS, INK, Figure, axis, decades, layout, safe

CELLS = 13
"""Number of cells of the map of best strategies in each direction."""
RANGE = 100.0
"""Factor by which the map of best strategies varies bandwidth and model size, up and down."""


def write_plan(outlook: Outlook, advice: Advice, path: Path | str, further: Sequence[Listing] = ()) -> Path:
    """Write the page of a plan to `path`, whose folder is created if it is missing, and return the path.

    `further` are additional tables, which come first on the page.
    """
    return plan_page(outlook, advice, further).write(path)


def plan_page(outlook: Outlook, advice: Advice, further: Sequence[Listing] = ()) -> Page:
    """Return the HTML page of a plan: advice, figures, and tables with all values of the figures."""
    ranked = advice.ranked(outlook)
    marked = {place: "chosen" for place, one in enumerate(ranked) if one is advice.choice}
    rows = [cells(outlook, one, advice.speedups[one.name]) for one in ranked]
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
        drawings.append(
            Drawing("map", "Best strategy by bandwidth and number of parameters", MAP, best_there.picture(outlook))
        )
        listings.append(best_there.table())
    return Page(
        brand="flockstep plan",
        title=f"{outlook.task.name} on {many(outlook.workers, 'worker')} of {outlook.site.cluster.name}",
        footer="Predictions, not measurements. MB = 1,000,000 bytes.",
        sentences=advice.sentences,
        lists=(
            ("Why", advice.reasons),
            ("What would change this recommendation", advice.changes),
            ("Ruled out", ruled_out(advice.excluded)),
            ("Scaling", scaling(outlook.curves, advice.excluded)),
            ("What these figures do not include", [*outlook.left_out, *unplanned(outlook)]),
        ),
        drawings=drawings,
        listings=listings,
    )


_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")
_DASHES = ("solid", "dot", "dashdot")
PREDICTED = (
    "Speed-up: predicted speed relative to one worker. It is the ratio of the samples per second, divided by the "
    "factor by which the strategy needs more samples than one worker for the same accuracy. Strategies are sorted by "
    "speed-up, including strategies that are ruled out. The other columns: samples per second of all workers "
    "together; time between two gradients of a worker; share of this time spent computing; bytes sent per step by a "
    "worker, and through the busiest server; staleness in versions, mean and maximum; memory on a worker; whether the "
    "figures come from a rehearsal with all workers or from an extrapolation. The recommended strategy has the green "
    "row. "
)
GRADED = (
    "The columns of table 2 of Langer et al. (2020), computed for this job: whether the data of the workers must be "
    "similar; whether the best learning rate is higher or lower than that of one worker; staleness in versions; "
    "number of hyper-parameters that the strategy adds; share of the slowest worker's delay by which all workers are "
    "delayed (over 100 %: the delay also affects later steps); number of worker deaths that the strategy survives; how "
    "hard it is to reproduce a result exactly; and number of differences from training on one worker."
)
SCALING = (
    "Speed-up over the number of workers: predicted speed relative to one worker, from rehearsals with constant "
    "gradient times plus the delay caused by the slowest worker. The thick dashed line is one worker alone."
)
MAP = (
    "The strategy with the highest predicted speed-up among the strategies that meet the requirements and fit in "
    f"memory, or one worker where no strategy reaches a speed-up of {MARGIN:g}, over bandwidth and number of "
    "parameters, if a gradient always takes the same number of operations. The legend explains the letters. The cross "
    "marks this cluster and model."
)


def scaling_picture(outlook: Outlook) -> Figure:
    """Return the figure of the predicted speed-up over the number of workers, with one line for each strategy."""
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": safe(short(one.name)),
            "x": one.workers,
            "y": one.speedups,
            "line": {"color": COLORS[place % len(COLORS)], "dash": _DASHES[place % len(_DASHES)]},
            "marker": {"symbol": _SYMBOLS[place % len(_SYMBOLS)], "size": 8},
            "hovertemplate": "%{x} workers: speed-up %{y:.3g}<extra>" + safe(short(one.name)) + "</extra>",
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
    speedups = [max(speedup, LITTLE) for one in outlook.curves for speedup in one.speedups]
    up = axis("speed relative to one worker", type="log", **decades([1, *speedups], number))
    legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}
    return {"data": data, "layout": layout(520, xaxis=across, yaxis=up, hovermode="closest", legend=legend)}


def scaling_table(outlook: Outlook) -> Listing:
    """Return the table of the predicted speed-up over the number of workers, with one row for each strategy."""
    sizes = sorted({n for one in outlook.curves for n in one.workers})
    rows = []
    for one in outlook.curves:
        known = dict(zip(one.workers, one.speedups, strict=True))
        rows.append((short(one.name), *(speedup_of(known.get(n)) for n in sizes)))
    headings = ("strategy", *(f"{n:,}" for n in sizes))
    return Listing("Speed-up by number of workers, as a table", "Speed-up over workers.", headings, rows)


@dataclass(frozen=True)
class Map:
    """A map of the best strategy for each combination of bandwidth and model size."""

    bandwidths: tuple[float, ...]
    """Bandwidths in bytes per second, in ascending order."""
    sizes: tuple[float, ...]
    """Model sizes in parameters, in ascending order."""
    names: tuple[tuple[str, ...], ...]
    """Names of the best strategies: one row for each model size, one column for each bandwidth."""

    @property
    def kinds(self) -> list[str]:
        """Names of all strategies on the map, in the order of the letters that stand for them."""
        return list(dict.fromkeys(name for row in self.names for name in row))

    def letter(self, name: str) -> str:
        """Return the letter that stands for a strategy's name: A, B, C and so on."""
        return chr(ord("A") + self.kinds.index(name))

    @property
    def key(self) -> str:
        """The text that explains the letters of the map."""
        meant = "; ".join(f"{self.letter(name)}: {short(name)}" for name in self.kinds)
        return f"Rows: number of parameters. Columns: bandwidth of the slowest link. {meant}."

    def table(self) -> Listing:
        """Return the map as a table of letters, with the largest model in the first row, as in the figure."""
        rows = [(amount(size), *map(self.letter, row)) for size, row in zip(self.sizes, self.names, strict=True)]
        headings = ("parameters", *map(speed, self.bandwidths))
        return Listing(
            "Best strategy by bandwidth and number of parameters, as a table of letters", self.key, headings, rows[::-1]
        )

    def picture(self, outlook: Outlook) -> Figure:
        """Return the map as a figure with a colored cell and a letter for each combination of bandwidth and model
        size.
        """
        kinds, count = self.kinds, len(self.kinds)
        colors = [COLORS[place % len(COLORS)] for place in range(count)]
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
            "colorscale": [[(place + end) / count, color] for place, color in enumerate(colors) for end in (0, 1)],
            "showscale": False,
            "xgap": 1,
            "ygap": 1,
            "hovertemplate": "%{customdata}<extra></extra>",
        }
        keys = [
            _mark(f"{self.letter(kind)}: {short(kind)}", None, None, color, "square")
            for kind, color in zip(kinds, colors, strict=True)
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
    """Return the map of the best strategies for bandwidths and model sizes around those of the plan, among the
    strategies that meet the requirements; None if no strategy meets them.
    """
    site, others = outlook.site, _compared(outlook, advice)
    if not others:
        return None
    factors = [RANGE ** (2 * i / (CELLS - 1) - 1) for i in range(CELLS)]

    def there(size: float, quick: float) -> str:
        moved = replace(site, task=site.task.scaled(size), cluster=faster(site.cluster, quick))
        asked = advice.requirements
        return best(others, moved, outlook.workers, slower=slower(asked), unbalanced="unbalanced" in asked)

    return Map(
        tuple(site.link[1] * one for one in factors),
        tuple(site.task.elements * one for one in factors),
        tuple(tuple(there(size, quick) for quick in factors) for size in factors),
    )


def _compared(outlook: Outlook, advice: Advice) -> list[ScalablePrediction]:
    """The strategies on the map: the best ones that meet the requirements, and one worker if it does."""
    out = {name for name, _ in advice.excluded}
    left = [one for one in outlook.scalable if one.name not in out]
    left.sort(key=lambda one: -advice.speedups[one.name])
    return [one for one in left if one.pace is not None][:BEST_SHOWN] + [one for one in left if one.pace is None]


def _mark(name: str, x: float | None, y: float | None, color: str, symbol: str) -> dict[str, Any]:
    marker = {"color": color, "symbol": symbol, "size": 12}
    return {"type": "scatter", "mode": "markers", "name": safe(name), "x": [x], "y": [y], "marker": marker}
