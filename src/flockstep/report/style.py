"""What all figures share: one colour, dash and symbol per run, fonts, axes, and panels side by side."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flockstep.records.folder import Record

Figure = dict[str, Any]
"""A plotly figure as plain data: {"data": [...], "layout": {...}}."""

COLOURS = (
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
"""plotly's name of a line style → the same as SVG's stroke-dasharray."""
ACTIVITIES = {
    "compute": ("computing", "#3d4f66"),
    "comm": ("communicating", "#e8a33d"),
    "wait": ("waiting", "#cfd5dd"),
}
WIDE = 100.0
"""Ratio of the ends of an axis above which powers of ten are ticks enough."""
INK, GRID, FONT = "#1d2733", "#e6e9ee", "system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif"


@dataclass(frozen=True)
class Series:
    """A run as it is drawn: the same in every figure."""

    label: str
    record: Record
    place: int
    """0 for the best run."""

    @property
    def colour(self) -> str:
        """Line and bar colour."""
        return COLOURS[self.place % len(COLOURS)]

    @property
    def dash(self) -> str:
        """Line style: a second cue, for those who do not tell the colours apart."""
        return list(DASHES)[self.place % len(DASHES)]

    @property
    def stroke(self) -> str:
        """The same line style for SVG."""
        return DASHES[self.dash]

    @property
    def name(self) -> str:
        """The label, safe as plotly text."""
        return safe(self.label)

    def title(self, width: int) -> str:
        """The label, safe and broken into lines of at most `width` characters."""
        return wrapped(self.label, width)


def title_px(titles: Sequence[str]) -> int:
    """Height of the strip above each panel in which these titles and the axis above fit."""
    return 24 + 16 * max(title.count("<br>") + 1 for title in titles)


def safe(text: str) -> str:
    """`text` with everything that plotly would read as markup made harmless."""
    return html.escape(text, quote=False)


def wrapped(text: str, width: int) -> str:
    """`text`, safe and broken into lines."""
    return "<br>".join(safe(line) for line in textwrap.wrap(text, width) or [text])


def layout(height: int, **more: Any) -> dict[str, Any]:
    """The common layout; `more` is plotly's own."""
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
    """A thin axis with light grid lines; `more` is plotly's own."""
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
    """For `axis`: ticks at powers of ten of a unit between these values; where those are close, also at 2 and 5."""
    low, high = (math.log10(end / unit) for end in (min(values), max(values)))
    steps = (1.0,) if 10**high > WIDE * 10**low else (1.0, 2.0, 5.0)
    every = [unit * step * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for step in steps]
    ticks = [tick for tick in every if min(values) * 0.9 <= tick <= max(values) * 1.1]
    return {"tickvals": ticks, "ticktext": [said(tick) for tick in ticks]}


def key(letter: str, index: int) -> str:
    """plotly's name of the index-th axis in a layout: xaxis, xaxis2, … and so on."""
    return f"{letter}axis{index + 1 if index else ''}"


def ref(letter: str, index: int) -> str:
    """plotly's name of the index-th axis in a trace: x, x2, … and so on."""
    return f"{letter}{index + 1 if index else ''}"


@dataclass(frozen=True)
class Panels:
    """A grid of small plots; panel i is filled row by row from the top left."""

    count: int
    columns: int
    gap_x: float = 0.035
    title_px: int = 40
    panel_px: int = 150
    bottom_px: int = 60

    @property
    def rows(self) -> int:
        """Number of rows."""
        return -(-self.count // self.columns)

    @property
    def plot_px(self) -> int:
        """Height of the plotting area."""
        return self.rows * (self.title_px + self.panel_px)

    @property
    def height(self) -> int:
        """Height of the figure, margins included."""
        return self.plot_px + self.bottom_px + 30

    def domain(self, index: int) -> tuple[list[float], list[float]]:
        """x and y range of panel `index`, as shares of the plotting area."""
        row, column = divmod(index, self.columns)
        width = (1 - self.gap_x * (self.columns - 1)) / self.columns
        left = column * (width + self.gap_x)
        top = 1 - (row * (self.title_px + self.panel_px) + self.title_px) / self.plot_px
        return [left, min(left + width, 1.0)], [max(top - self.panel_px / self.plot_px, 0.0), top]

    def heading(self, index: int, text: str, colour: str) -> dict[str, Any]:
        """An annotation above panel `index`."""
        (left, _), (_, top) = self.domain(index)
        return heading(text, left, top, colour)


def heading(text: str, left: float, top: float, colour: str) -> dict[str, Any]:
    """An annotation above a plot, flush left, with a run's colour before it; `text` is safe already."""
    marked = f'<span style="color:{colour}">■</span> {text}'
    return {**above(marked, left, top), "align": "left", "font": {"size": 12, "color": INK}}


def above(text: str, left: float, top: float) -> dict[str, Any]:
    """An annotation above a plot, flush left; `text` is safe already."""
    paper = {"xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
    return {"text": text, "x": left, "y": top, **paper, "showarrow": False}


def by_rank(records: Sequence[tuple[str, Record]]) -> list[Series]:
    """Labelled records, the best first, as they are drawn."""
    return [Series(label, record, place) for place, (label, record) in enumerate(records)]
