"""Measurements as figures in one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flockstep.bench.codecs import CodecFigure
from flockstep.bench.simulator import SimulatorFigure
from flockstep.bench.turns import Figure
from flockstep.report.style import COLOURS, Panels, axis, key, layout, ref
from flockstep.report.style import Figure as Drawing

SPEEDS = ("encode", "encode_residual", "add_decoded")


def of_rates(figures: Sequence[Figure]) -> Drawing:
    """GB/s against the array's size: a line for each way, a panel for each number of processes; bars are quartiles."""
    counts = sorted({one.workers for one in figures})
    ways = list(dict.fromkeys(one.way for one in figures))
    panels = Panels(len(counts), min(2, len(counts)), gap_x=0.09, panel_px=360)
    made: dict[str, object] = {}
    data: list[dict[str, object]] = []
    for index, count in enumerate(counts):
        left_right, low_high = panels.domain(index)
        title = f"bytes of the array, {count} processes"
        made[key("x", index)] = axis(title, type="log", domain=left_right, anchor=ref("y", index))
        made[key("y", index)] = axis("GB/s" if index == 0 else "", type="log", domain=low_high, anchor=ref("x", index))
        for place, way in enumerate(ways):
            mine = [one for one in figures if one.way == way and one.workers == count and one.seconds]
            if mine:
                data.append(_line(mine, way, place, index, first=index == 0))
    return {"data": data, "layout": layout(panels.height + 80, legend={"orientation": "h", "y": -0.2}, **made)}


def _line(mine: Sequence[Figure], way: str, place: int, index: int, first: bool) -> dict[str, object]:
    rates = [one.bytes / one.seconds / 1e9 for one in mine if one.seconds]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": way,
        "legendgroup": way,
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
        "line": {"color": COLOURS[place % len(COLOURS)], "dash": ("solid", "10px,4px", "2px,3px")[place % 3]},
        "hovertemplate": "%{x:,} bytes<br>%{y:.3g} GB/s<extra>" + way + "</extra>",
        "xaxis": ref("x", index),
        "yaxis": ref("y", index),
    }


def of_codecs(figures: Sequence[CodecFigure]) -> Drawing:
    """A bar for each codec and speed, relative to a copy."""
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": what,
            "y": [one.codec for one in figures],
            "x": [getattr(one, what) for one in figures],
            "marker": {"color": COLOURS[place]},
            "hovertemplate": "%{y}<br>%{x:.3g} of a copy's rate<extra>" + what + "</extra>",
        }
        for place, what in enumerate(SPEEDS)
    ]
    axes = {
        "xaxis": axis("rate, a copy of the array being 1", type="log"),
        "yaxis": axis(autorange="reversed"),
    }
    height = 120 + 48 * len(figures)
    return {"data": data, "layout": layout(height, barmode="group", legend={"orientation": "h", "y": 1.05}, **axes)}


def of_simulator(figures: Sequence[SimulatorFigure]) -> Drawing:
    """Worker-steps per second against replicas: a line for each strategy."""
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
                "line": {"color": COLOURS[place % len(COLOURS)]},
                "hovertemplate": "%{x} replicas<br>%{y:,.0f} worker-steps/s<extra>" + name + "</extra>",
            }
        )
    axes = {"xaxis": axis("replicas", type="log"), "yaxis": axis("worker-steps per second", type="log")}
    return {"data": data, "layout": layout(480, legend={"orientation": "h", "y": -0.2}, **axes)}


def write(drawing: Drawing, out: Path, title: str) -> Path:
    """One HTML file that needs nothing else; returns its path."""
    import plotly.graph_objects as go

    drawing["layout"]["title"] = {"text": title, "x": 0.01}
    drawing["layout"]["margin"] = {"l": 64, "r": 24, "t": 72, "b": 56}
    out.parent.mkdir(parents=True, exist_ok=True)
    go.Figure(drawing).write_html(out, include_plotlyjs=True)
    return out
