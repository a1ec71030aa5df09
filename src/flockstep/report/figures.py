"""Figures of runs: metrics and losses, how workers spend their time, a timeline, staleness of updates."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from flockstep.messages import node_name
from flockstep.records.curves import CurvePoint
from flockstep.records.events import SpanEvent
from flockstep.report import formatting
from flockstep.report.style import (
    ACTIVITIES,
    INK,
    SQUARE,
    Figure,
    Series,
    axis,
    heading,
    layout,
    ref,
    safe,
    small_multiples,
)

Axis = tuple[str, Callable[[CurvePoint], float | None]]
"""A horizontal axis: its title, and the place of a point on it."""
_SECONDS: Axis = ("seconds", lambda point: point.seconds)
_BYTES: Axis = ("MB sent per worker", lambda point: point.sent_bytes / 1e6)
_SAMPLES: Axis = ("samples, all workers", lambda point: point.samples)
_STEPS: Axis = ("steps per worker", lambda point: point.step)
_COLUMNS = 3
_CURVES_PX, _GAP_PX = 319, 76
"""Height in pixels of a row of plots of curves, and of the titles between two rows."""
_MOST_BARS = 40
_MOST_WORKERS = (8, 4)
"""Largest number of workers on a timeline: of a few runs, and of many."""
_MOST_SERVERS = (2, 1)
_MANY_RUNS = 5
_MOST_SPANS = 600
_ROW_PX, _TITLE_PX = 17, 34
"""Height in pixels of a node on a timeline, and of the title of a run."""


def progress(series: Sequence[Series]) -> Figure:
    """Return a figure of three plots for each metric and loss (rows), against seconds, bytes, and samples or, where
    samples are not known, steps (columns).

    A ring marks the point at which a run reached the target. A trace's legendgroup is the rank of its run, which the
    legend of the page uses.
    """
    first, shown, across = series[0].record.summary, names(series), axes_across(series)
    gap = _GAP_PX / (_CURVES_PX * len(shown))
    height = (1 - gap * (len(shown) - 1)) / len(shown)
    data, axes = list[dict[str, Any]](), dict[str, Any]()
    for row, name in enumerate(shown):
        top = 1 - row * (height + gap)
        curves = [one.curves[name] for one in series if name in one.curves]
        log = all(curve.is_loss and min(curve.finite) > 0 for curve in curves)
        for column, (title, _) in enumerate(across):
            panel, left = _COLUMNS * row + column, column * 0.345
            x, y = ref("xaxis", panel), ref("yaxis", panel)
            # plotly leaves axes that it is not told to fit at [0, 6] as soon as one axis beside them has a range
            fit = {"autorange": True} if column or (last := _last_second(series)) is None else {"range": [0, last]}
            title = "virtual seconds" if column == 0 and first.clock == "virtual" else title
            domain = [left, min(left + 0.31, 1.0)]
            axes[x] = axis(title, domain=domain, anchor=ref("y", panel), rangemode="tozero", **fit)
            axes[y] = axis(
                (safe(name) + " (log)" * log) if column == 0 else "",
                domain=[max(top - height, 0.0), top],
                anchor=ref("x", panel),
                showticklabels=column == 0,
                autorange=True,
            )
            if column:
                axes[y]["matches"] = ref("y", _COLUMNS * row)
            if log:
                axes[y] |= {"type": "log", "tickformat": ".4~g"}
            if row < len(shown) - 1:
                axes[x]["matches"] = ref("x", _COLUMNS * (len(shown) - 1) + column)
    for one in series:
        for row, name in enumerate(shown):
            for column, by in enumerate(across):
                data += _curve(one, name, by, _COLUMNS * row + column)
    shapes, notes = [], []
    if first.target is not None and shown[:1] == [first.metric]:
        line = {"color": INK, "width": 1, "dash": "4px,4px"}
        for column in range(_COLUMNS):
            place = {"type": "line", "xref": f"{ref('x', column)} domain", "yref": ref("y", column), "x0": 0, "x1": 1}
            shapes.append({**place, "y0": first.target, "y1": first.target, "line": line, "layer": "below"})
        place = {"xref": "x3 domain", "yref": "y3", "x": 1, "y": first.target, "xanchor": "right"}
        below = {"yanchor": "top" if first.higher_is_better else "bottom", "showarrow": False, "font": {"size": 11}}
        notes.append({"text": f"target {first.target:g}", **place, **below})
    made = layout(
        72 + _CURVES_PX * len(shown),
        shapes=shapes,
        annotations=notes,
        showlegend=False,
        margin={"l": 64, "r": 24, "t": 16, "b": 56},
        hovermode="closest",
        **axes,
    )
    return {"data": data, "layout": made}


def names(series: Sequence[Series]) -> list[str]:
    """Return the names of the curves, one a row of plots: the metric that ranks the runs, other metrics, losses."""
    main = series[0].record.summary.metric
    found = {curve.name: curve for one in series for curve in one.curves.values()}
    return sorted(found, key=lambda name: (found[name].is_loss, name != main))


def axes_across(series: Sequence[Series]) -> tuple[Axis, Axis, Axis]:
    """Return the horizontal axes: seconds, bytes, and samples if all curves know them, otherwise steps."""
    points = (curve.points[0] for one in series for curve in one.curves.values())
    return _SECONDS, _BYTES, _SAMPLES if all(point.samples is not None for point in points) else _STEPS


def _curve(one: Series, name: str, across: Axis, panel: int) -> list[dict[str, Any]]:
    """The curve of a run in one plot, if it has one, and the ring where it reached the target."""
    curve, summary, (x_name, x_of) = one.curves.get(name), one.record.summary, across
    if curve is None:
        return []
    common = {"legendgroup": str(one.place), "name": one.name, "xaxis": ref("x", panel), "yaxis": ref("y", panel)}
    traces: list[dict[str, Any]] = [
        {
            **common,
            "type": "scatter",
            "mode": "lines" if len(curve.points) > 1 else "markers",
            "x": [x_of(point) for point in curve.points],
            "y": [point.value if math.isfinite(point.value) else None for point in curve.points],
            "line": {"color": one.color, "dash": one.dash, "width": 2},
            "hovertemplate": f"%{{x:.4~g}} {x_name}<br>{safe(name)} %{{y:.4~g}}<extra>{one.name}</extra>",
        }
    ]
    # not at the summary's time, which is a median if the strategy has several runs
    hit = None if name != summary.metric else curve.first_reaching(summary.target)
    if hit is not None:
        marker = {"symbol": "circle", "size": 10, "color": "#ffffff", "line": {"color": one.color, "width": 2.5}}
        text = f"target reached<br>%{{x:.4~g}} {x_name}<extra>{one.name}</extra>"
        point = {"x": [x_of(hit)], "y": [hit.value], "mode": "markers", "marker": marker, "hovertemplate": text}
        traces.append({**common, **point, "type": "scatter"})
    return traces


def _last_second(series: Sequence[Series]) -> float | None:
    """End of the axis of seconds: when the last run of several workers ended, or one worker reached the target; None
    for the end of the longest run.

    One worker takes n times as long as n workers for as many samples, which would leave the others 1/n of the axis.
    """
    if not any(one.alone for one in series):
        return None
    ends = [(one.record.summary.seconds_to_target if one.alone else one.record.summary.seconds) for one in series]
    return 1.05 * max(end or 0.0 for end in ends) or None


def staleness(series: Sequence[Series]) -> Figure | None:
    """Return a histogram of staleness for each run with recorded staleness; None if no run has any."""
    shown = [one for one in series if one.record.summary.staleness_counts]
    if not shown:
        return None
    largest = max(one.record.summary.staleness_max or 0 for one in shown)
    width = max(1, -(-(largest + 1) // _MOST_BARS))

    def draw(one: Series) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
        counts = one.record.summary.staleness_counts
        bins: Counter[int] = Counter()
        for late, count in counts.items():
            bins[late // width] += count
        bars = sorted(bins.items())
        trace = {
            "type": "bar",
            "name": one.name,
            "x": [start * width + (width - 1) / 2 for start, _ in bars],
            "y": [count / bins.total() for _, count in bars],
            "width": width * 0.86,
            "marker": {"color": one.color},
            "customdata": [
                [str(s) if width == 1 else f"{s * width} to {s * width + width - 1}", count] for s, count in bars
            ],
            "hovertemplate": "staleness %{customdata[0]}<br>%{customdata[1]:,} updates (%{y:.1%})<extra></extra>",
        }
        x = {"range": [-0.6 * width, largest + 0.6 * width], **({"dtick": 1} if largest < 9 else {})}
        matches = None if one is shown[0] else "y"
        return [trace], x, {"tickformat": ".0%", "rangemode": "tozero", "matches": matches, "nticks": 4}

    return small_multiples(shown, ("staleness [updates]", "share of updates"), 120, draw)


def per_step(series: Sequence[Series]) -> Figure:
    """Return a figure with a bar per run: mean milliseconds of a worker's step, by activity."""
    shown = [one for one in series if one.record.summary.steps]
    labels = [f"{SQUARE.format(color=one.color)} {one.title(46)}" for one in shown]
    data = []
    totals = [sum(_ms_per_step(one, kind) for kind in ACTIVITIES) for one in shown]
    for kind, (name, color) in ACTIVITIES.items():
        amounts = [_ms_per_step(one, kind) for one in shown]
        shares = [formatting.share(a / t if t else None) for a, t in zip(amounts, totals, strict=True)]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": labels,
                "x": amounts,
                "text": [t if a > 0.045 * max(totals) else "" for a, t in zip(amounts, shares, strict=True)],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "textfont": {"color": "#ffffff" if kind == "compute" else "#1d2733", "size": 12},
                "marker": {"color": color},
                "customdata": shares,
                "hovertemplate": f"{name}: %{{x:.4~g}} ms a step (%{{customdata}})<extra>%{{y}}</extra>",
            }
        )
    clock = "virtual ms" if series[0].record.summary.clock == "virtual" else "ms"
    place = {"xanchor": "left", "showarrow": False, "xshift": 5, "font": {"size": 12}}
    notes = [
        {"text": f"{formatting.number(total)} ms", "x": total, "y": name, **place}
        for total, name in zip(totals, labels, strict=True)
    ]
    made = layout(
        130 + 34 * len(shown),
        barmode="stack",
        bargap=0.28,
        uniformtext={"minsize": 10, "mode": "hide"},
        xaxis=axis(f"{clock} per local step, mean over workers", rangemode="tozero"),
        yaxis=axis(autorange="reversed", showline=False, ticks=""),
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        margin={"l": 64, "r": 70, "t": 40, "b": 56},
        annotations=notes,
    )
    return {"data": data, "layout": made}


def _ms_per_step(one: Series, kind: str) -> float:
    summary = one.record.summary
    total: float = sum(getattr(worker, f"{kind}_seconds") for worker in summary.per_worker)
    return 1e3 * total / max(summary.steps, 1)


def per_worker(series: Sequence[Series]) -> Figure:
    """Return a figure with a panel per run: how each worker's time is divided among activities."""

    def draw(one: Series) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
        workers = [worker for worker in one.record.summary.per_worker if worker.seconds > 0]
        traces = []
        for kind, (name, color) in ACTIVITIES.items():
            spent = [getattr(worker, f"{kind}_seconds") for worker in workers]
            traces.append(
                {
                    "type": "bar",
                    "name": name,
                    "x": [worker.rank for worker in workers],
                    "y": [time / worker.seconds for time, worker in zip(spent, workers, strict=True)],
                    "width": 0.86 if len(workers) <= 32 else 1.0,
                    "marker": {"color": color, "line": {"width": 0}},
                    "customdata": [[formatting.seconds(t), w.steps] for t, w in zip(spent, workers, strict=True)],
                    "hovertemplate": f"worker %{{x}}, {name}: %{{customdata[0]}} (%{{y:.1%}})"
                    "<br>%{customdata[1]:,} steps<extra></extra>",
                }
            )
        count = one.record.summary.workers
        x = {"range": [-0.6, count - 0.4], "ticks": "", **({"dtick": 1} if count <= 16 else {"nticks": 6})}
        return traces, x, {"range": [0, 1], "tickformat": ".0%", "tickvals": [0, 0.5, 1]}

    return small_multiples(series, ("worker", "share of time"), 110, draw, barmode="stack")


def timeline(series: Sequence[Series]) -> Figure | None:
    """Return a figure of the activities of nodes in their first steps; None if no run recorded spans."""
    many, shown = len(series) >= _MANY_RUNS, []
    for one in series:  # its first few nodes
        spans = [
            event
            for event in one.record.events
            if isinstance(event, SpanEvent)
            and -_MOST_SERVERS[many] <= event.node < _MOST_WORKERS[many]
            and event.kind in ACTIVITIES
        ]
        if spans:
            shown.append((one, sorted(spans, key=lambda span: span.start)[:_MOST_SPANS]))
    if not shown:
        return None
    nodes = [sorted({span.node for span in spans}, key=lambda n: (n < 0, abs(n))) for _, spans in shown]
    plot_px = sum(_TITLE_PX + _ROW_PX * len(names) for names in nodes)
    data, made, notes, used = [], {}, [], 0
    for index, ((one, spans), names) in enumerate(zip(shown, nodes, strict=True)):
        top = 1 - (used + _TITLE_PX) / plot_px
        used += _TITLE_PX + _ROW_PX * len(names)
        made[ref("yaxis", index)] = axis(
            domain=[max(1 - used / plot_px, 0.0), top],
            anchor="x",
            range=[len(names) - 0.5, -0.5],
            tickvals=list(range(len(names))),
            ticktext=[node_name(node) for node in names],
            tickfont={"size": 10},
            ticks="",
            showgrid=False,
        )
        notes.append(heading(one.name, 0, top, one.color))
        for kind, (name, color) in ACTIVITIES.items():
            if chosen := [span for span in spans if span.kind == kind]:
                data.append(
                    {
                        "type": "bar",
                        "orientation": "h",
                        "name": name,
                        "y": [names.index(span.node) for span in chosen],
                        "base": [1e3 * span.start for span in chosen],
                        "x": [1e3 * (span.end - span.start) for span in chosen],
                        "width": 0.8,
                        "marker": {"color": color, "line": {"color": "#ffffff", "width": 0.4}},
                        "customdata": [node_name(span.node) for span in chosen],
                        "hovertemplate": f"%{{customdata}} {name}<br>%{{base:.4~g}} ms + %{{x:.4~g}} ms<extra></extra>",
                        "xaxis": "x",
                        "yaxis": ref("y", index),
                    }
                )
    clock = "virtual ms" if series[0].record.summary.clock == "virtual" else "ms"
    # A few slow runs do not hide the others.
    ends = [max(span.end for span in spans) for _, spans in shown]
    until = min(max(ends), 2.5 * statistics.median(ends)) or 1.0
    x = axis(f"{clock} since the start", range=[0, 1e3 * until], anchor=ref("y", len(shown) - 1))
    margin = {"l": 76, "r": 24, "t": 8, "b": 56}
    more = {"barmode": "overlay", "annotations": notes, "margin": margin, "showlegend": False}
    return {"data": data, "layout": layout(plot_px + 70, **more, xaxis=x, **made)}
