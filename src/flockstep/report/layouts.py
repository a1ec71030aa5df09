"""Redraws figure 14 of Langer et al. (2020): lower bounds of the communication delay of a step, by parameter layout.

One line for each of the eight layouts, over the number of workers and over the link speed, with one panel per model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flockstep.collectives.layouts import LAYOUTS, Times
from flockstep.errors import ConfigurationError
from flockstep.report import formatting
from flockstep.report.page import Drawing, Listing, Page
from flockstep.report.style import COLORS, GRID, Figure, above, axis, key, layout, ref, safe

WORKERS = tuple(1 << power for power in range(11))
SPEEDS = tuple(1e8 / 8 * 10 ** (step / 2) for step in range(7))
"""Bandwidths of a link, in bytes per second, from 100 Mbit/s to 100 Gbit/s."""
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star")
DASHES = ("solid", "dash", "dot", "dashdot", "solid", "dash", "dot", "dashdot")
MOST = 4
"""Largest number of models in one figure."""
PANEL_PX, GAP_PX, TOP_PX = 330, 120, 120
CAPTION = (
    "Lower bound of the time in which one step exchanges and updates the parameters: transmitting, adding gradients "
    "(10 GiB/s) and updating (2 GiB/s), one after the other, without latency. The time to compute gradients is not "
    "included. Upper row: over the number of workers. Lower row: over the bandwidth of every worker's link."
)


@dataclass(frozen=True)
class ModelSize:
    """A model that is described only by its size in bytes."""

    name: str
    parameters: int
    nbytes: int


@dataclass(frozen=True)
class Delays:
    """Communication delays of models on `workers` workers, each with a link of `bandwidth` bytes per second."""

    models: tuple[ModelSize, ...]
    workers: int
    bandwidth: float

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigurationError(f"layouts need >= 1 worker, got {self.workers}; 16 is usual")
        if not 1 <= len(self.models) <= MOST:
            raise ConfigurationError(f"layouts need 1 to {MOST} models, got {len(self.models)}; give for example vgg-a")

    def seconds(self, model: ModelSize, name: str) -> float:
        """Return the seconds per step of the layout `name` for one model."""
        return LAYOUTS[name](self.workers, Times.of(model.nbytes, self.bandwidth))

    @property
    def link(self) -> str:
        """Bandwidth of the link as text, for example "1 Gbit/s"."""
        return speed(self.bandwidth)

    def document(self) -> dict[str, Any]:
        """Return models, bandwidth and the seconds of every layout as a dictionary, for JSON."""
        found = {model.name: {name: self.seconds(model, name) for name in LAYOUTS} for model in self.models}
        sizes = {model.name: {"parameters": model.parameters, "bytes": model.nbytes} for model in self.models}
        return {"workers": self.workers, "bandwidth": self.bandwidth, "models": sizes, "seconds": found}

    def rows(self) -> list[tuple[str, ...]]:
        """Rows of the table of delays: one row for each layout, one column for each model."""
        return [(name, *(formatting.seconds(self.seconds(model, name)) for model in self.models)) for name in LAYOUTS]

    def sentences(self) -> list[str]:
        """Sentences with the main results of the table of delays."""
        shared = [name for name in LAYOUTS if not name.startswith("asynchronous")]
        said = []
        for model in self.models:
            least, most = min(shared, key=lambda n: self.seconds(model, n)), "naive server"
            times = self.seconds(model, most) / self.seconds(model, least)
            said.append(
                f"{model.name} ({formatting.size(model.nbytes)}) on {self.workers} workers with links of "
                f"{self.link}: a step takes at least {formatting.seconds(self.seconds(model, most))} with the layout "
                f"{most} and at least {formatting.seconds(self.seconds(model, least))} with the layout {least}, "
                f"which is {formatting.number(times)} times less."
            )
        return said


def speed(bandwidth: float) -> str:
    """Format bytes per second as bits per second, for example "1 Gbit/s"."""
    bits = 8 * bandwidth
    for unit, scale in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= 0.9995 * scale:
            return f"{bits / scale:.3g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"


def layouts_page(delays: Delays) -> Page:
    """Return the HTML page with the figure of delays, and with the delays as tables."""
    headings = ("layout", *(f"{model.name} ({formatting.size(model.nbytes)})" for model in delays.models))
    note = f"Lower bounds in seconds per step, for {delays.workers} workers with links of {delays.link}."
    return Page(
        brand="flockstep layouts",
        title=f"Lower bound of the delay per step by layout, {delays.workers} workers, {delays.link}",
        footer="Lower bounds after Langer et al. (2020), figure 14. MB = 1,000,000 bytes.",
        lists=(("In words", delays.sentences()),),
        drawings=(Drawing("layouts", "Layout: where the parameters are stored", CAPTION, picture(delays)),),
        listings=(
            Listing("Least delay", note, headings, delays.rows()),
            *(_over_workers(delays, model) for model in delays.models),
        ),
    )


def _over_workers(delays: Delays, model: ModelSize) -> Listing:
    times = Times.of(model.nbytes, delays.bandwidth)
    rows = [(name, *(formatting.seconds(form(n, times)) for n in WORKERS)) for name, form in LAYOUTS.items()]
    heading = f"{model.name}: lower bound of the delay per step, by number of workers"
    return Listing(heading, f"{delays.link} each.", ("layout", *(f"{n:,}" for n in WORKERS)), rows)


def picture(delays: Delays) -> Figure:
    """Return the figure of delays: one column of two panels for each model, one line for each layout.

    The upper panels are over the number of workers, the lower over the bandwidth.
    """
    count = len(delays.models)
    width = (1 - 0.06 * (count - 1)) / count
    height = 2 * PANEL_PX + GAP_PX
    domains = [[1 - PANEL_PX / height, 1.0], [0.0, PANEL_PX / height]]
    made: dict[str, Any] = {}
    data: list[dict[str, Any]] = []
    titles = []
    for column, model in enumerate(delays.models):
        left = column * (width + 0.06)
        for row, domain in enumerate(domains):
            place = row * count + column
            data += _lines(delays, model, row, place)
            made[key("x", place)] = _across(row, place, [left, left + width])
            title = "seconds a step" if column == 0 else ""
            made[key("y", place)] = axis(
                title, domain=domain, anchor=ref("x", place), type="log", dtick=1, exponentformat="SI", ticksuffix=" s"
            )
            there = delays.link if row == 0 else f"{delays.workers} workers"
            titles.append(
                above(f"<b>{safe(f'{model.name} ({formatting.size(model.nbytes)}), {there}')}</b>", left, domain[1])
            )
    legend = {"orientation": "h", "x": 0, "y": 1 + 44 / height, "yanchor": "bottom"}
    margin = {"l": 64, "r": 24, "t": TOP_PX, "b": 56}
    whole = layout(height + TOP_PX + 56, legend=legend, hovermode="closest", annotations=titles, **made)
    return {"data": data, "layout": {**whole, "margin": margin}}


def _lines(delays: Delays, model: ModelSize, row: int, place: int) -> list[dict[str, Any]]:
    made = []
    for index, (name, form) in enumerate(LAYOUTS.items()):
        if row == 0:
            x: Sequence[float] = WORKERS
            y = [form(n, Times.of(model.nbytes, delays.bandwidth)) for n in WORKERS]
            where = "%{x} workers"
        else:
            x = [8e-6 * one for one in SPEEDS]
            y = [form(delays.workers, Times.of(model.nbytes, one)) for one in SPEEDS]
            where = "%{x:.3s} Mbit/s"
        made.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": safe(name),
                "legendgroup": name,
                "showlegend": place == 0,
                "x": x,
                "y": y,
                "line": {"color": COLORS[index], "dash": DASHES[index], "width": 1.6},
                "marker": {"symbol": SYMBOLS[index], "size": 6},
                "xaxis": ref("x", place),
                "yaxis": ref("y", place),
                "hovertemplate": f"{where}: %{{y:.3s}}s<extra>{safe(name)}</extra>",
            }
        )
    return made


def _across(row: int, place: int, domain: list[float]) -> dict[str, Any]:
    more: dict[str, Any] = {"domain": domain, "anchor": ref("y", place), "type": "log", "gridcolor": GRID}
    if row == 0:
        shown = WORKERS[::2]
        return axis("workers", tickvals=list(shown), ticktext=[f"{n:,}" for n in shown], **more)
    return axis(
        "everyone's link",
        tickvals=[100, 1000, 10_000, 100_000],
        ticktext=["100 Mbit/s", "1 Gbit/s", "10 Gbit/s", "100 Gbit/s"],
        tickangle=0,
        **more,
    )
