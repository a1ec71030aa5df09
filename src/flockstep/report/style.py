"""The common style of all figures: color and dash of each run, fonts, axes, and a panel for each run."""

from __future__ import annotations

import functools
import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flockstep.records.curves import MetricCurve, curves
from flockstep.records.folder import Record
from flockstep.report.formatting import lines

Figure = dict[str, Any]
"""A plotly figure as plain data: {"data": [...], "layout": {...}}."""

COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc3d95",
    "#7a5195",
    "#56a5dd",
    "#8c6d1f",
    "#1b2f7a",
    "#7f9c1e",
    "#b01e2e",
    "#3fb8af",
    "#8a8a8a",
)
DASHES = {"solid": "none", "10px,4px": "10 4", "2px,3px": "2 3"}
"""plotly's name of a line style → the equivalent stroke-dasharray of SVG."""
ALONE_DASH = "5px,3px"
"""plotly's name of the line style of one worker alone."""
ACTIVITIES = {"compute": ("computing", "#3d4f66"), "comm": ("communicating", "#e8a33d"), "wait": ("waiting", "#cfd5dd")}
SQUARE = '<span style="color:{color}">■</span>'
"""Character that is drawn in a run's color before the run's name."""
INK, GRID, FONT = "#1d2733", "#e6e9ee", "system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif"


@dataclass(frozen=True)
class Series:
    """A run with its label and its rank, which determines color and line style in every figure."""

    label: str
    record: Record
    place: int
    """Rank of the run; 0 is the best run."""
    alone: bool = False
    """Whether this is the run of one worker with which the others are compared: dark and dashed in every figure."""

    @functools.cached_property
    def curves(self) -> dict[str, MetricCurve]:
        """Name → curve of each metric and loss of the run that has a finite value."""
        found = curves(self.record.config, self.record.events)
        return {curve.name: curve for curve in found if curve.finite}

    @property
    def color(self) -> str:
        """Color of the run's lines and bars."""
        return INK if self.alone else COLORS[self.place % len(COLORS)]

    @property
    def dash(self) -> str:
        """Line style of the run, for readers who cannot tell the colors apart."""
        return ALONE_DASH if self.alone else list(DASHES)[self.place % len(DASHES)]

    @property
    def stroke(self) -> str:
        """Line style of the run as SVG's stroke-dasharray."""
        return self.dash.replace("px,", " ").removesuffix("px") if self.alone else DASHES[self.dash]

    @property
    def name(self) -> str:
        """The label of the run, escaped for plotly."""
        return safe(self.label)

    def title(self, width: int) -> str:
        """Return the label of the run, escaped for plotly and broken into lines of at most `width` characters."""
        return "<br>".join(map(safe, lines(self.label, width)))


def safe(text: str) -> str:
    """Escape everything in `text` that plotly would read as markup."""
    return html.escape(text, quote=False)


def layout(height: int, **more: Any) -> dict[str, Any]:
    """Return the layout that all figures share, with the further keys in `more`."""
    return {
        "height": height,
        "font": {"family": FONT, "size": 13, "color": INK},
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "margin": {"l": 64, "r": 24, "t": 48, "b": 56},
        "hoverlabel": {"font": {"family": FONT}},
        **more,
    }


def axis(title: str = "", **more: Any) -> dict[str, Any]:
    """Return a thin axis with light grid lines, with the further keys in `more`."""
    made: dict[str, Any] = {
        "gridcolor": GRID,
        "zeroline": False,
        "linecolor": "#9aa5b1",
        "showline": True,
        "ticks": "outside",
        "tickcolor": "#9aa5b1",
        "automargin": True,
        **more,
    }
    if title:
        made["title"] = {"text": title, "standoff": 8}
    return made


def ref(letter: str, index: int) -> str:
    """Return plotly's name of the axis number `index` in a trace: x, x2, and so on; `xaxis` for a name in a layout."""
    return f"{letter}{index + 1 if index else ''}"


def small_multiples(
    series: Sequence[Series],
    titles: tuple[str, str],
    panel_px: int,
    draw: Callable[[Series], tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]],
    **more: Any,
) -> Figure:
    """Return a figure with a panel of `panel_px` pixels below the name of each run, row by row from the top left.

    `titles`: of the horizontal and the vertical axes, shown only at the bottom and at the left; `draw`: returns the
    traces of a run, and further keys of the two axes of its panel; `more`: further keys of the layout.
    """
    names, columns, gap = [one.title(32) for one in series], min(4, len(series)), 0.035
    # A strip above each panel holds its title, and the labels of the axis of the panel above.
    title_px = 24 + 16 * max(name.count("<br>") + 1 for name in names)
    plot_px = -(-len(series) // columns) * (title_px + panel_px)
    width = (1 - gap * (columns - 1)) / columns
    data, notes = list[dict[str, Any]](), list[dict[str, Any]]()
    for index, (one, name) in enumerate(zip(series, names, strict=True)):
        row, column = divmod(index, columns)
        left, top = column * (width + gap), 1 - (row * (title_px + panel_px) + title_px) / plot_px
        x_ref, y_ref = ref("x", index), ref("y", index)
        traces, x, y = draw(one)
        data += [{**trace, "xaxis": x_ref, "yaxis": y_ref} for trace in traces]
        across = titles[0] if index + columns >= len(series) else ""
        domain = [max(top - panel_px / plot_px, 0.0), top]
        more[ref("xaxis", index)] = axis(across, domain=[left, min(left + width, 1.0)], anchor=y_ref, **x)
        more[ref("yaxis", index)] = axis(
            "" if column else titles[1], domain=domain, anchor=x_ref, showticklabels=column == 0, **y
        )
        notes.append(heading(name, left, top, one.color))
    margin = {"l": 64, "r": 24, "t": 8, "b": 56}
    return {"data": data, "layout": layout(plot_px + 86, annotations=notes, showlegend=False, margin=margin, **more)}


def heading(text: str, left: float, top: float, color: str) -> dict[str, Any]:
    """Return an annotation above a plot, aligned left, after a square in the run's color; `text` must be escaped."""
    place = {"x": left, "y": top, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
    marked = f"{SQUARE.format(color=color)} {text}"
    return {"text": marked, **place, "showarrow": False, "align": "left", "font": {"size": 12, "color": INK}}
