"""The common style of all figures: color, dash and symbol of each run, fonts, axes, and grids of panels."""

from __future__ import annotations

import functools
import html
import math
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
ACTIVITIES = {
    "compute": ("computing", "#3d4f66"),
    "comm": ("communicating", "#e8a33d"),
    "wait": ("waiting", "#cfd5dd"),
}
SQUARE = '<span style="color:{color}">■</span>'
"""Character that is drawn in a run's color before the run's name."""
WIDE = 100.0
"""Ratio of an axis's largest to its smallest value above which ticks are only at powers of ten."""
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
        return wrapped(self.label, width)


def title_px(titles: Sequence[str]) -> int:
    """Return the height in pixels of the strip above each panel, which holds the panel's title (one of `titles`) and
    the labels of the axis of the panel above.
    """
    return 24 + 16 * max(title.count("<br>") + 1 for title in titles)


def safe(text: str) -> str:
    """Escape everything in `text` that plotly would read as markup."""
    return html.escape(text, quote=False)


def wrapped(text: str, width: int) -> str:
    """Escape `text` for plotly and break it into lines of at most `width` characters, never inside a word."""
    return "<br>".join(map(safe, lines(text, width)))


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


def decades(values: Sequence[float], said: Callable[[float], str], unit: float = 1.0) -> dict[str, Any]:
    """Return the keys of `axis` for ticks at powers of ten of `unit`, within the range of `values`; in a narrow range,
    also at 2 and 5.
    """
    low, high = (math.log10(end / unit) for end in (min(values), max(values)))
    steps = (1.0,) if 10**high > WIDE * 10**low else (1.0, 2.0, 5.0)
    every = [unit * step * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for step in steps]
    ticks = [tick for tick in every if min(values) * 0.9 <= tick <= max(values) * 1.1]
    return {"tickvals": ticks, "ticktext": [said(tick) for tick in ticks]}


def key(letter: str, index: int) -> str:
    """Return plotly's name of the axis number `index` in a layout: xaxis, xaxis2, and so on."""
    return f"{letter}axis{index + 1 if index else ''}"


def ref(letter: str, index: int) -> str:
    """Return plotly's name of the axis number `index` in a trace: x, x2, and so on."""
    return f"{letter}{index + 1 if index else ''}"


@dataclass(frozen=True)
class Panels:
    """A grid of small plots, filled row by row from the top left."""

    count: int
    columns: int
    gap_x: float = 0.035
    title_px: int = 40
    panel_px: int = 150
    bottom_px: int = 60

    @property
    def rows(self) -> int:
        """Number of rows of the grid."""
        return -(-self.count // self.columns)

    @property
    def plot_px(self) -> int:
        """Height of the plotting area in pixels."""
        return self.rows * (self.title_px + self.panel_px)

    @property
    def height(self) -> int:
        """Height of the figure in pixels, including margins."""
        return self.plot_px + self.bottom_px + 30

    def domain(self, index: int) -> tuple[list[float], list[float]]:
        """Return the x range and the y range of panel `index`, as fractions of the plotting area."""
        row, column = divmod(index, self.columns)
        width = (1 - self.gap_x * (self.columns - 1)) / self.columns
        left = column * (width + self.gap_x)
        top = 1 - (row * (self.title_px + self.panel_px) + self.title_px) / self.plot_px
        return [left, min(left + width, 1.0)], [max(top - self.panel_px / self.plot_px, 0.0), top]

    def axes(self, index: int, across: str, up: str, x: dict[str, Any], y: dict[str, Any]) -> dict[str, Any]:
        """Return the axes of panel `index`; their titles are shown only at the bottom and at the left of the grid."""
        (x_domain, y_domain), first = self.domain(index), index % self.columns == 0
        below = "" if index + self.columns < self.count else across
        beside = {"domain": y_domain, "anchor": ref("x", index), "showticklabels": first}
        return {
            key("x", index): axis(below, domain=x_domain, anchor=ref("y", index), **x),
            key("y", index): axis(up if first else "", **beside, **y),
        }

    def heading(self, index: int, text: str, color: str) -> dict[str, Any]:
        """Return the title of panel `index` as an annotation."""
        (left, _), (_, top) = self.domain(index)
        return heading(text, left, top, color)


def heading(text: str, left: float, top: float, color: str) -> dict[str, Any]:
    """Return an annotation above a plot, aligned left, after a square in the run's color; `text` must be escaped."""
    marked = f"{SQUARE.format(color=color)} {text}"
    return {**above(marked, left, top), "align": "left", "font": {"size": 12, "color": INK}}


def above(text: str, left: float, top: float) -> dict[str, Any]:
    """Return an annotation above a plot, aligned left; `text` must be escaped."""
    paper = {"xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
    return {"text": text, "x": left, "y": top, **paper, "showarrow": False}
