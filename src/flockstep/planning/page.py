"""A plan as one self-contained page: advice, scaling curves, a map of what is best, and the tables."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from flockstep.planning.advice import Advice
from flockstep.planning.criteria import worth
from flockstep.planning.plan import KEEN, Outlook, combines
from flockstep.planning.scaling import Contender, best, faster
from flockstep.planning.words import HEADINGS, TABLE_2, cells, row_of_table_2, scaling_sentence, unplanned
from flockstep.report.html import _environment, _plotly_source, _script_safe
from flockstep.report.style import COLOURS, INK, Figure, axis, layout, safe

CELLS = 9
"""Of the map, in each direction."""
RANGE = 100.0
"""How far bandwidth and model size go, up and down."""


def write_plan(outlook: Outlook, advice: Advice, path: Path | str) -> Path:
    """Write the page to `path` and return it; the folder is made if need be."""
    path = Path(path)
    text = render_plan(outlook, advice)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def render_plan(outlook: Outlook, advice: Advice) -> str:
    """The page as text."""
    figures = []
    if outlook.curves:
        figures.append(("scaling", "How it scales", SCALING, scaling_picture(outlook)))
    if outlook.workers > 1 and math.isfinite(outlook.site.link[1]):
        figures.append(("map", "Where what is best", MAP, best_map(outlook)))
    chosen = {True: "chosen", False: ""}
    ranked = [(chosen[one is advice.choice], cells(outlook, one)) for one in outlook.prospects]
    graded = [(chosen[one is advice.choice], row_of_table_2(outlook, one)) for one in outlook.prospects]
    return (
        _environment()
        .get_template("plan.html.j2")
        .render(
            title=f"{outlook.task.name} on {outlook.workers} workers of {outlook.site.cluster.name}",
            sentences=advice.sentences,
            lists=(
                ("Why", advice.reasons),
                ("What would change this", advice.changes),
                ("Scaling", [scaling_sentence(one) for one in outlook.curves]),
                ("Not in these figures", [*outlook.left_out, *unplanned(outlook)]),
            ),
            figures=figures,
            tables=[("Predictions", HEADINGS, ranked), ("Criteria", TABLE_2, graded)],
            json=_script_safe,
            plotly=_plotly_source(),
        )
    )


SCALING = (
    "Samples per second over workers, from closed forms: constant times, and on top what the slowest worker costs. "
    "Dashed: one worker alone."
)
MAP = (
    "The strategy that is worth most, samples per second after the toll of its departures, over bandwidth and "
    "parameters; the work of a gradient stays the same. The cross: this cluster and model."
)


def scaling_picture(outlook: Outlook) -> Figure:
    """A line for each strategy."""
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": safe(one.name),
            "x": one.workers,
            "y": one.samples_per_second,
            "line": {"color": COLOURS[place % len(COLOURS)]},
            "hovertemplate": "%{x} workers: %{y:.4s} samples/s<extra>" + safe(one.name) + "</extra>",
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
            "y": [outlook.alone.samples_per_second] * 2,
            "line": {"color": "#3d4f66", "dash": "dash"},
        }
    )
    across = axis("workers", type="log", tickvals=list(outlook.curves[0].workers), title_standoff=8)
    up = axis("samples per second", type="log", exponentformat="SI")
    return {"data": data, "layout": layout(460, xaxis=across, yaxis=up, hovermode="closest")}


def best_map(outlook: Outlook) -> Figure:
    """Bandwidth × model size → the best strategy."""
    site = outlook.site
    factors = [RANGE ** (2 * i / (CELLS - 1) - 1) for i in range(CELLS)]
    rivals = _rivals(outlook)
    names = [[_best(outlook, rivals, size, speed) for speed in factors] for size in factors]
    kinds = list(dict.fromkeys(name for row in names for name in row))
    colours = [COLOURS[place % len(COLOURS)] for place in range(len(kinds))]
    bandwidth = site.link[1] * 8e-6
    heat = {
        "type": "heatmap",
        "x": [bandwidth * one for one in factors],
        "y": [site.task.elements * one for one in factors],
        "z": [[kinds.index(name) for name in row] for row in names],
        "text": [[safe(name) for name in row] for row in names],
        "zmin": -0.5,
        "zmax": len(kinds) - 0.5,
        "colorscale": [[(place + end) / len(kinds), colour] for place, colour in enumerate(colours) for end in (0, 1)],
        "showscale": False,
        "opacity": 0.75,
        "hovertemplate": "%{x:.3s} Mbit/s, %{y:.3s} parameters: %{text}<extra></extra>",
    }
    keys = [_mark(kind, None, None, colour, "square") for kind, colour in zip(kinds, colours, strict=True)]
    here = _mark("here", bandwidth, site.task.elements, INK, "x")
    across = axis("Mbit/s of the slowest link", type="log", exponentformat="SI")
    up = axis("parameters", type="log", exponentformat="SI")
    return {"data": [heat, *keys, here], "layout": layout(460, xaxis=across, yaxis=up, hovermode="closest")}


def _rivals(outlook: Outlook) -> list[Contender]:
    """Those that are worth most here, and one worker."""
    ranked = sorted(
        (one for one in outlook.contenders if combines(one.found)),
        key=lambda one: -worth(one.found.samples_per_second, one.said),
    )
    return [one for one in ranked if one.pace is not None][:KEEN] + [one for one in ranked if one.pace is None]


def _best(outlook: Outlook, rivals: list[Contender], size: float, speed: float) -> str:
    """With so many times the parameters, and the bandwidth."""
    site = outlook.site
    there = replace(site, task=site.task.scaled(size), cluster=faster(site.cluster, speed))
    return best(rivals, there, outlook.workers)


def _mark(name: str, x: float | None, y: float | None, colour: str, symbol: str) -> dict[str, Any]:
    marker = {"color": colour, "symbol": symbol, "size": 12}
    return {"type": "scatter", "mode": "markers", "name": safe(name), "x": [x], "y": [y], "marker": marker}
