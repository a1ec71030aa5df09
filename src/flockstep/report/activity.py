"""Figures of how runs spend their time: per step, per worker, and on a timeline of the first steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from flockstep.messages import node_name
from flockstep.records.events import SpanEvent
from flockstep.report import formatting
from flockstep.report.style import (
    ACTIVITIES,
    GRID,
    SQUARE,
    Figure,
    Panels,
    Series,
    axis,
    heading,
    key,
    layout,
    ref,
    title_px,
)

_MOST_WORKERS = (8, 4)
_MOST_SERVERS = (2, 1)
_MANY_RUNS = 5
_MOST_SPANS = 600
_ROW_PX = 17
_TITLE_PX = 34


def per_step(series: Sequence[Series]) -> Figure:
    """Return a figure with one bar per run: mean milliseconds per local step that a worker computed, communicated and
    waited.
    """
    shown = [one for one in series if one.record.summary.steps]
    names = [f"{SQUARE.format(color=one.color)} {one.title(46)}" for one in shown]
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
                "y": names,
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
    notes = [_total(one, name) for one, name in zip(shown, names, strict=True)]
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


def _total(one: Series, name: str) -> dict[str, Any]:
    total = sum(_ms_per_step(one, kind) for kind in ACTIVITIES)
    place = {"x": total, "y": name, "xanchor": "left", "showarrow": False, "xshift": 5, "font": {"size": 12}}
    return {"text": f"{formatting.number(total)} ms", **place}


def per_worker(series: Sequence[Series]) -> Figure:
    """Return a figure with one panel per run and one stacked bar per worker: the shares of computing, communicating
    and waiting.
    """
    titles = [one.title(32) for one in series]
    columns = min(4, len(series))
    panels = Panels(len(series), columns, title_px=title_px(titles), panel_px=110, bottom_px=56)
    data, notes = [], []
    made: dict[str, Any] = {}
    for index, one in enumerate(series):
        data += _worker_bars(one, index)
        workers = one.record.summary.workers
        x = {"range": [-0.6, workers - 0.4], "ticks": "", **({"dtick": 1} if workers <= 16 else {"nticks": 6})}
        y = {"range": [0, 1], "tickformat": ".0%", "tickvals": [0, 0.5, 1]}
        made |= panels.axes(index, "worker", "share of time", x, y)
        notes.append(panels.heading(index, titles[index], one.color))
    margin = {"l": 64, "r": 24, "t": 8, "b": 56}
    more = {"barmode": "stack", "showlegend": False, "annotations": notes, "margin": margin}
    return {"data": data, "layout": layout(panels.height, **more, **made)}


def _worker_bars(one: Series, index: int) -> list[dict[str, Any]]:
    workers = [worker for worker in one.record.summary.per_worker if worker.seconds > 0]
    return [
        {
            "type": "bar",
            "name": name,
            "x": [worker.rank for worker in workers],
            "y": [getattr(worker, f"{kind}_seconds") / worker.seconds for worker in workers],
            "width": 0.86 if len(workers) <= 32 else 1.0,
            "marker": {"color": color, "line": {"width": 0}},
            "customdata": [
                [formatting.seconds(getattr(worker, f"{kind}_seconds")), worker.steps] for worker in workers
            ],
            "hovertemplate": f"worker %{{x}}, {name}: %{{customdata[0]}} (%{{y:.1%}})"
            "<br>%{customdata[1]:,} steps<extra></extra>",
            "xaxis": ref("x", index),
            "yaxis": ref("y", index),
        }
        for kind, (name, color) in ACTIVITIES.items()
    ]


def timeline(series: Sequence[Series]) -> Figure | None:
    """Return a figure of the activity of every node during the first steps, with all runs on one time axis; None if no
    run recorded spans.
    """
    shown = [(one, _spans(one, len(series) >= _MANY_RUNS)) for one in series]
    shown = [(one, spans) for one, spans in shown if spans]
    if not shown:
        return None
    nodes = [sorted({span.node for span in spans}, key=lambda n: (n < 0, abs(n))) for _, spans in shown]
    plot_px = sum(_TITLE_PX + _ROW_PX * len(names) for names in nodes)
    data, made, notes, used = [], {}, [], 0
    for index, ((one, spans), names) in enumerate(zip(shown, nodes, strict=True)):
        top = 1 - (used + _TITLE_PX) / plot_px
        used += _TITLE_PX + _ROW_PX * len(names)
        made[key("y", index)] = axis(
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
        data += [trace for kind in ACTIVITIES if (trace := _bars(spans, kind, names, index))]
    clock = "virtual ms" if series[0].record.summary.clock == "virtual" else "ms"
    x = axis(f"{clock} since the start", range=[0, 1e3 * _extent(shown)], anchor=ref("y", len(shown) - 1))
    margin = {"l": 76, "r": 24, "t": 8, "b": 56}
    more = {"barmode": "overlay", "annotations": notes, "margin": margin, "showlegend": False}
    return {"data": data, "layout": layout(plot_px + 70, **more, xaxis={**x, "gridcolor": GRID}, **made)}


def _spans(one: Series, many: bool) -> list[SpanEvent]:
    """The spans of the run's first few nodes, at most `_MOST_SPANS`, in order of their start.

    There are fewer nodes if `many` runs are drawn.
    """
    chosen = [
        event
        for event in one.record.events
        if isinstance(event, SpanEvent)
        and -_MOST_SERVERS[many] <= event.node < _MOST_WORKERS[many]
        and event.kind in ACTIVITIES
    ]
    return sorted(chosen, key=lambda span: span.start)[:_MOST_SPANS]


def _bars(spans: Sequence[SpanEvent], kind: str, nodes: Sequence[int], index: int) -> dict[str, Any] | None:
    chosen = [span for span in spans if span.kind == kind]
    if not chosen:
        return None
    name, color = ACTIVITIES[kind]
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [nodes.index(span.node) for span in chosen],
        "base": [1e3 * span.start for span in chosen],
        "x": [1e3 * (span.end - span.start) for span in chosen],
        "width": 0.8,
        "marker": {"color": color, "line": {"color": "#ffffff", "width": 0.4}},
        "customdata": [node_name(span.node) for span in chosen],
        "hovertemplate": f"%{{customdata}} {name}<br>%{{base:.4~g}} ms + %{{x:.4~g}} ms<extra></extra>",
        "xaxis": "x",
        "yaxis": ref("y", index),
    }


def _extent(shown: Sequence[tuple[Series, list[SpanEvent]]]) -> float:
    """Seconds that the time axis shows: the whole timeline, but at most 2.5 times the median run, so that a few slow
    runs do not hide the others.
    """
    ends = [max(span.end for span in spans) for _, spans in shown]
    return min(max(ends), 2.5 * statistics.median(ends)) or 1.0
