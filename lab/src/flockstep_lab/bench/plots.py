"""Figures of benchmark results in one self-contained HTML page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from flockstep.report import formatting
from flockstep.report import page as report
from flockstep.report.page import Page
from flockstep.report.style import COLORS, INK, axis, layout, ref
from flockstep.report.style import Figure as Drawing
from flockstep.report.terminal import TableColumn, TextTable
from flockstep_lab.bench.codecs import CodecFigure
from flockstep_lab.bench.interleaved import Measurement
from flockstep_lab.bench.prediction import WITHIN, Truth
from flockstep_lab.bench.simulator import SimulatorFigure

SPEEDS = {"encode": "encode", "encode_residual": "encode + residual", "add_decoded": "decode + add"}
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")
RATES = (
    "Size of the array divided by the median time of one call, against the size of the array. Error bars show the "
    "first and third quartiles."
)
OF_COPIES = (
    "Encoded or decoded elements per second, relative to a plain copy of the array in the same round; higher is faster."
)
STEPS = (
    "Number of gradients that all replicas together compute in virtual time, per second of real time; higher is faster."
)

PREDICTED = (
    "One point for each strategy and bandwidth. On the solid line prediction and measurement are equal; between the "
    "dotted lines the prediction differs from the measured time by less than a fifth."
)

WIDE = 100.0
"""Ratio of an axis's largest to its smallest value above which ticks are only at powers of ten."""
_ABOVE = {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom"}


def of_rates(figures: Sequence[Measurement]) -> Drawing:
    """Plot GB/s against array size: a line for each implementation, a panel for each number of processes.

    Error bars are quartiles.
    """
    counts = sorted({one.workers for one in figures})
    implementations = list(dict.fromkeys(one.implementation for one in figures))
    columns = min(2, len(counts))
    rows = -(-len(counts) // columns)
    grid = {"rows": rows, "columns": columns, "pattern": "independent", "xgap": 0.18, "ygap": 0.1}
    made: dict[str, object] = {}
    data: list[dict[str, object]] = []
    for index, count in enumerate(counts):
        title = f"size of the array in bytes, {count} processes"
        sizes = sorted({one.bytes for one in figures if one.workers == count})
        rates = [one.bytes / one.seconds / 1e9 for one in figures if one.workers == count and one.seconds] or [1.0]
        ticks = {"tickvals": sizes, "ticktext": [formatting.size(size) for size in sizes]}
        made[ref("xaxis", index)] = axis(title, type="log", **ticks)
        made[ref("yaxis", index)] = axis("GB/s" if index == 0 else "", type="log", **_decades(rates))
        for place, implementation in enumerate(implementations):
            mine = [
                one for one in figures if one.implementation == implementation and one.workers == count and one.seconds
            ]
            if mine:
                data.append(_line(mine, implementation, place, index, first=index == 0))
    return {"data": data, "layout": layout(400 * rows + 170, legend=_ABOVE, grid=grid, **made)}


def _line(mine: Sequence[Measurement], implementation: str, place: int, index: int, first: bool) -> dict[str, object]:
    rates = [one.bytes / one.seconds / 1e9 for one in mine if one.seconds]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": implementation,
        "legendgroup": implementation,
        "showlegend": first,
        "x": [one.bytes for one in mine],
        "y": rates,
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [one.bytes / one.low / 1e9 - rate for one, rate in zip(mine, rates, strict=True) if one.low],
            "arrayminus": [
                rate - one.bytes / one.high / 1e9 for one, rate in zip(mine, rates, strict=True) if one.high
            ],
            "thickness": 1,
        },
        "line": {"color": COLORS[place % len(COLORS)], "dash": ("solid", "10px,4px", "2px,3px")[place % 3]},
        "marker": {"symbol": SYMBOLS[place % len(SYMBOLS)], "size": 8},
        "hovertemplate": "%{x:,} bytes<br>%{y:.3g} GB/s<extra>" + implementation + "</extra>",
        "xaxis": ref("x", index),
        "yaxis": ref("y", index),
    }


def _decades(values: Sequence[float]) -> dict[str, Any]:
    """The keys of `axis` for ticks at powers of ten, within the range of `values`; in a narrow range,
    also at 2 and 5.
    """
    low, high = (math.log10(end) for end in (min(values), max(values)))
    steps = (1.0,) if 10**high > WIDE * 10**low else (1.0, 2.0, 5.0)
    every = [step * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for step in steps]
    ticks = [tick for tick in every if min(values) * 0.9 <= tick <= max(values) * 1.1]
    return {"tickvals": ticks, "ticktext": [f"{tick:,.10g}" for tick in ticks]}


def of_codecs(figures: Sequence[CodecFigure]) -> Drawing:
    """Plot a bar for each codec and rate, relative to the rate of a copy."""
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": said,
            "y": [one.codec for one in figures],
            "x": [getattr(one, what) for one in figures],
            "marker": {"color": COLORS[place]},
            "hovertemplate": "%{y}<br>%{x:.3g} times the rate of a copy<extra>" + said + "</extra>",
        }
        for place, (what, said) in enumerate(SPEEDS.items())
    ]
    rates = [rate for one in figures for what in SPEEDS if (rate := getattr(one, what))] or [1.0]
    axes = {
        "xaxis": axis("rate relative to copying the array", type="log", **_decades(rates)),
        "yaxis": axis(autorange="reversed"),
    }
    height = 120 + 48 * len(figures)
    return {"data": data, "layout": layout(height, barmode="group", legend=_ABOVE, **axes)}


def of_simulator(figures: Sequence[SimulatorFigure]) -> Drawing:
    """Plot worker-steps per second against the number of replicas, one line for each strategy."""
    data = []
    for place, name in enumerate(dict.fromkeys(one.strategy for one in figures)):
        mine = [one for one in figures if one.strategy == name]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": [one.replicas for one in mine],
                "y": [one.rate for one in mine],
                "line": {"color": COLORS[place % len(COLORS)]},
                "marker": {"symbol": SYMBOLS[place % len(SYMBOLS)], "size": 8},
                "hovertemplate": "%{x} replicas<br>%{y:,.0f} worker-steps/s<extra>" + name + "</extra>",
            }
        )
    counts = sorted({one.replicas for one in figures})
    axes = {
        "xaxis": axis("replicas", type="log", tickvals=counts, ticktext=[f"{count:,}" for count in counts]),
        "yaxis": axis("worker-steps per second", type="log", **_decades([one.rate for one in figures])),
    }
    return {"data": data, "layout": layout(480, legend=_ABOVE, **axes)}


def of_prediction(truth: Truth) -> Drawing:
    """Plot predicted against measured seconds per step: a color for each bandwidth, a symbol for each strategy."""
    data: list[dict[str, object]] = []
    ends = [min(min(one.predicted, one.measured) for one in truth.pairs) / 1.5]
    ends.append(max(max(one.predicted, one.measured) for one in truth.pairs) * 1.5)
    for factor, dash in ((1.0, "solid"), (1 - WITHIN, "dot"), (1 + WITHIN, "dot")):
        line = {"color": INK, "width": 1, "dash": dash}
        ys = [factor * one for one in ends]
        data.append({"type": "scatter", "mode": "lines", "x": ends, "y": ys, "line": line, "showlegend": False})
        data[-1]["hoverinfo"] = "skip"
    strategies = list(dict.fromkeys(one.strategy for one in truth.pairs))
    symbols = {
        name: f"{SYMBOLS[i % len(SYMBOLS)]}{'-open' if i >= len(SYMBOLS) else ''}" for i, name in enumerate(strategies)
    }
    for place, bandwidth in enumerate(truth.bandwidths):
        mine = [one for one in truth.pairs if one.bandwidth == bandwidth]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": bandwidth,
                "x": [one.measured for one in mine],
                "y": [one.predicted for one in mine],
                "text": [f"{one.strategy}: {one.error:+.1%}" for one in mine],
                "marker": {
                    "color": COLORS[place % len(COLORS)],
                    "symbol": [symbols[one.strategy] for one in mine],
                    "size": 10,
                },
                "hovertemplate": "%{text}<br>measured %{x:.3g} s per step<br>predicted %{y:.3g} s per step<extra>"
                + bandwidth
                + "</extra>",
            }
        )
    for name, symbol in symbols.items():  # in the legend only
        key_only: dict[str, object] = {"type": "scatter", "mode": "markers", "name": name, "x": [None], "y": [None]}
        data.append({**key_only, "marker": {"color": INK, "symbol": symbol, "size": 9}})
    axes = {"xaxis": axis("measured seconds per step", type="log")}
    axes["yaxis"] = axis("predicted seconds per step", type="log")
    return {"data": data, "layout": layout(620, legend={"x": 1.02, "y": 1.0}, **axes)}


def page(title: str, caption: str, drawing: Drawing, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Page:
    """Return the HTML page: the figure, with the printed table below it."""
    return Page(
        brand="flockstep bench",
        title=title,
        footer="Measured on this machine; all implementations took turns in one run.",
        drawings=(report.Drawing("picture", title, caption, drawing),),
        tables=(TextTable([TableColumn(one, text=not at) for at, one in enumerate(headings)], rows, "In figures"),),
    )
