"""Figures of the quality of training: metric and loss against seconds, bytes and samples; staleness of updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from flockstep.records.events import EvaluationEvent
from flockstep.records.summary import Summary
from flockstep.report.style import INK, Figure, Panels, Series, axis, key, layout, ref, title_px

_X: tuple[tuple[str, Callable[[EvaluationEvent], float]], ...] = (
    ("seconds", lambda s: s.seconds),
    ("MB sent per worker", lambda s: s.sent_bytes / 1e6),
    ("samples, all workers", lambda s: float(s.samples)),
)
_MOST_BARS = 40


def progress(series: Sequence[Series]) -> Figure:
    """Six plots: metric and loss (rows) against seconds, bytes and samples (columns).

    A ring marks where a run reached the target. A trace's legendgroup is its run's place, for the page's own legend.
    """
    first = series[0].record.summary
    data: list[dict[str, Any]] = []
    for one in series:
        data += _curves(one)
    shapes = []
    if first.target is not None:
        for column in range(3):
            line = {"color": INK, "width": 1, "dash": "4px,4px"}
            place = {"type": "line", "xref": f"{ref('x', column)} domain", "yref": ref("y", column), "x0": 0, "x1": 1}
            shapes.append({**place, "y0": first.target, "y1": first.target, "line": line, "layer": "below"})
    made = layout(
        710,
        shapes=shapes,
        annotations=_target_note(first),
        showlegend=False,
        margin={"l": 64, "r": 24, "t": 16, "b": 56},
        hovermode="closest",
        **_axes(first, _losses(series)),
    )
    return {"data": data, "layout": made}


def _curves(one: Series) -> list[dict[str, Any]]:
    snapshots = [event for event in one.record.events if isinstance(event, EvaluationEvent)]
    summary = one.record.summary
    hit = next((s for s in snapshots if s.seconds == summary.seconds_to_target), None)
    data: list[dict[str, Any]] = []
    for panel in range(6):
        row, column = divmod(panel, 3)
        what, of = (summary.metric, _metric) if row == 0 else ("test loss", _loss)
        x_name, x_of = _X[column]
        common = {"legendgroup": str(one.place), "name": one.name, "xaxis": ref("x", panel), "yaxis": ref("y", panel)}
        data.append(
            {
                **common,
                "type": "scatter",
                "mode": "lines" if len(snapshots) > 1 else "markers",
                "x": [x_of(s) for s in snapshots],
                "y": [of(s) for s in snapshots],
                "line": {"color": one.color, "dash": one.dash, "width": 2},
                "hovertemplate": f"%{{x:.4~g}} {x_name}<br>{what} %{{y:.4~g}}<extra>{one.name}</extra>",
            }
        )
        if row == 0 and hit is not None:
            marker = {"symbol": "circle", "size": 10, "color": "#ffffff", "line": {"color": one.color, "width": 2.5}}
            text = f"target reached<br>%{{x:.4~g}} {x_name}<extra>{one.name}</extra>"
            point = {"x": [x_of(hit)], "y": [hit.metric], "mode": "markers", "marker": marker, "hovertemplate": text}
            data.append({**common, **point, "type": "scatter"})
    return data


def _metric(snapshot: EvaluationEvent) -> float | None:
    return snapshot.metric if math.isfinite(snapshot.metric) else None


def _loss(snapshot: EvaluationEvent) -> float | None:
    return snapshot.loss if math.isfinite(snapshot.loss) else None


def _losses(series: Sequence[Series]) -> list[float]:
    return [
        e.loss for one in series for e in one.record.events if isinstance(e, EvaluationEvent) and math.isfinite(e.loss)
    ]


def _axes(first: Summary, losses: Sequence[float]) -> dict[str, Any]:
    log = bool(losses) and min(losses) > 0
    titles = (first.metric, "test loss (log)" if log else "test loss")
    made: dict[str, Any] = {}
    for panel in range(6):
        row, column = divmod(panel, 3)
        left, bottom = column * 0.345, 0.0 if row else 0.53
        x_title = "virtual seconds" if column == 0 and first.clock == "virtual" else _X[column][0]
        made[key("x", panel)] = axis(
            x_title, domain=[left, min(left + 0.31, 1.0)], anchor=ref("y", panel), rangemode="tozero"
        )
        made[key("y", panel)] = axis(
            titles[row] if column == 0 else "",
            domain=[bottom, bottom + 0.47 - 0.06 * row],
            anchor=ref("x", panel),
            showticklabels=column == 0,
            **({"matches": ref("y", 3 * row)} if column else {}),
            **({"type": "log", "tickvals": _log_ticks(losses)} if row and log else {}),
        )
        if row == 0:
            made[key("x", panel)]["matches"] = ref("x", panel + 3)
    return made


def _log_ticks(values: Sequence[float]) -> list[float]:
    """Ticks of a logarithmic axis: 1, 2 and 5 of every decade that `values` touch.

    From four decades on there are powers of ten only.
    """
    decades = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
    return [float(f"{digit}e{decade}") for decade in decades for digit in ((1, 2, 5) if len(decades) < 4 else (1,))]


def _target_note(first: Summary) -> list[dict[str, Any]]:
    if first.target is None:
        return []
    text = f"target {first.target:g}"
    place = {"xref": "x3 domain", "yref": "y3", "x": 1, "y": first.target, "xanchor": "right"}
    below = {"yanchor": "top" if first.higher_is_better else "bottom", "showarrow": False, "font": {"size": 11}}
    return [{"text": text, **place, **below}]


def near_target(series: Sequence[Series]) -> list[float] | None:
    """The range of the metric around the target and the best run, for a magnified view; None if there is no target."""
    summary = series[0].record.summary
    bests = [best for one in series if (best := one.record.summary.best_metric) is not None]
    if summary.target is None or not bests:
        return None
    best = (max if summary.higher_is_better else min)([*bests, summary.target])
    margin = 3 * abs(best - summary.target) or 0.05 * abs(summary.target)
    worst = summary.target - margin if summary.higher_is_better else summary.target + margin
    return sorted([worst, best + (best - worst) * 0.04])


def staleness(series: Sequence[Series]) -> Figure | None:
    """A histogram of staleness for each run whose record has staleness; None if no run has."""
    shown = [one for one in series if one.record.summary.staleness_counts]
    if not shown:
        return None
    titles = [one.title(32) for one in shown]
    panels = Panels(len(shown), min(4, len(shown)), title_px=title_px(titles), panel_px=120, bottom_px=56)
    largest = max(one.record.summary.staleness_max or 0 for one in shown)
    width = max(1, -(-(largest + 1) // _MOST_BARS))
    data, made, notes = [], {}, []
    for index, one in enumerate(shown):
        data.append(_histogram(one, index, width))
        x_domain, y_domain = panels.domain(index)
        bottom = index + panels.columns >= len(shown)
        made[key("x", index)] = axis(
            "staleness [updates]" if bottom else "",
            domain=x_domain,
            anchor=ref("y", index),
            range=[-0.6 * width, largest + 0.6 * width],
            **({"dtick": 1} if largest < 9 else {}),
        )
        made[key("y", index)] = axis(
            "share of updates" if index % panels.columns == 0 else "",
            domain=y_domain,
            anchor=ref("x", index),
            tickformat=".0%",
            rangemode="tozero",
            matches="y" if index else None,
            showticklabels=index % panels.columns == 0,
            nticks=4,
        )
        notes.append(panels.heading(index, titles[index], one.color))
    margin = {"l": 64, "r": 24, "t": 8, "b": 56}
    return {"data": data, "layout": layout(panels.height, annotations=notes, showlegend=False, margin=margin, **made)}


def _histogram(one: Series, index: int, width: int) -> dict[str, Any]:
    counts = one.record.summary.staleness_counts
    total = sum(counts.values())
    bins: dict[int, int] = {}
    for late, count in counts.items():
        bins[late // width] = bins.get(late // width, 0) + count
    starts = sorted(bins)
    return {
        "type": "bar",
        "name": one.name,
        "x": [start * width + (width - 1) / 2 for start in starts],
        "y": [bins[start] / total for start in starts],
        "width": width * 0.86,
        "marker": {"color": one.color},
        "customdata": [[str(s) if width == 1 else f"{s * width} to {s * width + width - 1}", bins[s]] for s in starts],
        "hovertemplate": "staleness %{customdata[0]}<br>%{customdata[1]:,} updates (%{y:.1%})<extra></extra>",
        "xaxis": ref("x", index),
        "yaxis": ref("y", index),
    }
