"""Figures of the quality of training: metrics and losses against seconds, bytes and samples or steps; staleness of
updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from flockstep.records.curves import CurvePoint
from flockstep.records.summary import Summary
from flockstep.report.style import INK, Figure, Panels, Series, axis, key, layout, ref, safe, title_px

Axis = tuple[str, Callable[[CurvePoint], float | None]]
"""A horizontal axis: its title, and the place of a point on it."""
_SECONDS: Axis = ("seconds", lambda point: point.seconds)
_BYTES: Axis = ("MB sent per worker", lambda point: point.sent_bytes / 1e6)
_SAMPLES: Axis = ("samples, all workers", lambda point: point.samples)
_STEPS: Axis = ("steps per worker", lambda point: point.step)
_COLUMNS = 3
_ROW_PX, _GAP_PX = 319, 76
"""Height in pixels of a row of plots, and of the titles between two rows."""
_MOST_BARS = 40


def progress(series: Sequence[Series]) -> Figure:
    """Return a figure of three plots for each metric and loss (rows), against seconds, bytes, and samples or, where
    samples are not known, steps (columns).

    A ring marks the point at which a run reached the target. A trace's legendgroup is the rank of its run, which the
    legend of the page uses.
    """
    first, shown, across = series[0].record.summary, names(series), axes_across(series)
    data: list[dict[str, Any]] = []
    for one in series:
        for row, name in enumerate(shown):
            for column, by in enumerate(across):
                data += _curve(one, name, by, _COLUMNS * row + column)
    shapes = []
    has_target = first.target is not None and shown[:1] == [first.metric]
    for column in range(_COLUMNS if has_target else 0):
        line = {"color": INK, "width": 1, "dash": "4px,4px"}
        place = {"type": "line", "xref": f"{ref('x', column)} domain", "yref": ref("y", column), "x0": 0, "x1": 1}
        shapes.append({**place, "y0": first.target, "y1": first.target, "line": line, "layer": "below"})
    made = layout(
        72 + _ROW_PX * len(shown),
        shapes=shapes,
        annotations=_target_note(first) if has_target else [],
        showlegend=False,
        margin={"l": 64, "r": 24, "t": 16, "b": 56},
        hovermode="closest",
        **_axes(series),
    )
    return {"data": data, "layout": made}


def names(series: Sequence[Series]) -> list[str]:
    """Return the names of the curves, one for each row of plots: the metric that ranks the runs, then the other
    metrics, then the losses.
    """
    main = series[0].record.summary.metric
    found = {curve.name: curve for one in series for curve in one.curves.values()}
    return sorted(found, key=lambda name: (found[name].is_loss, name != main))


def axes_across(series: Sequence[Series]) -> tuple[Axis, Axis, Axis]:
    """Return the horizontal axes: seconds, bytes, and samples if all curves know them, otherwise steps."""
    points = (curve.points[0] for one in series for curve in one.curves.values())
    return _SECONDS, _BYTES, _SAMPLES if all(point.samples is not None for point in points) else _STEPS


def _curve(one: Series, name: str, across: Axis, panel: int) -> list[dict[str, Any]]:
    """The curve of a run in one plot, and the ring where it reached the target; nothing if the run has no such
    curve.
    """
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


def _axes(series: Sequence[Series]) -> dict[str, Any]:
    shown, across = names(series), axes_across(series)
    virtual, last = series[0].record.summary.clock == "virtual", _last_second(series)
    made: dict[str, Any] = {}
    for panel in range(_COLUMNS * len(shown)):
        row, column = divmod(panel, _COLUMNS)
        x_domain, y_domain = _place(row, column, len(shown))
        log = _logarithmic(series, shown[row])
        title = "virtual seconds" if column == 0 and virtual else across[column][0]
        # plotly leaves axes that it is not told to fit at [0, 6] as soon as one axis beside them has a range
        until = {"autorange": True} if column or last is None else {"range": [0, last]}
        made[key("x", panel)] = axis(title, domain=x_domain, anchor=ref("y", panel), rangemode="tozero", **until)
        made[key("y", panel)] = axis(
            (safe(shown[row]) + " (log)" * log) if column == 0 else "",
            domain=y_domain,
            anchor=ref("x", panel),
            showticklabels=column == 0,
            **({"matches": ref("y", _COLUMNS * row)} if column else {}),
            autorange=True,
            **({"type": "log", "tickformat": ".4~g"} if log else {}),
        )
        if row < len(shown) - 1:
            made[key("x", panel)]["matches"] = ref("x", _COLUMNS * (len(shown) - 1) + column)
    return made


def _last_second(series: Sequence[Series]) -> float | None:
    """End of the axis of seconds: when the last run of several workers ended, or one worker reached the target; None
    for the end of the longest run.

    One worker takes n times as long as n workers for as many samples, which would leave the others 1/n of the axis.
    """
    if not any(one.alone for one in series):
        return None
    ends = [(one.record.summary.seconds_to_target if one.alone else one.record.summary.seconds) for one in series]
    return 1.05 * max(end or 0.0 for end in ends) or None


def _place(row: int, column: int, rows: int) -> tuple[list[float], list[float]]:
    """Horizontal and vertical range of a plot, as shares of the plotting area."""
    gap = _GAP_PX / (_ROW_PX * rows)
    height = (1 - gap * (rows - 1)) / rows
    left, top = column * 0.345, 1 - row * (height + gap)
    return [left, min(left + 0.31, 1.0)], [max(top - height, 0.0), top]


def _logarithmic(series: Sequence[Series], name: str) -> bool:
    """Whether the curves of this name are losses, all above 0."""
    found = [one.curves[name] for one in series if name in one.curves]
    return all(curve.is_loss and min(curve.finite) > 0 for curve in found)


def _target_note(first: Summary) -> list[dict[str, Any]]:
    if first.target is None:
        return []
    text = f"target {first.target:g}"
    place = {"xref": "x3 domain", "yref": "y3", "x": 1, "y": first.target, "xanchor": "right"}
    below = {"yanchor": "top" if first.higher_is_better else "bottom", "showarrow": False, "font": {"size": 11}}
    return [{"text": text, **place, **below}]


def staleness(series: Sequence[Series]) -> Figure | None:
    """Return a histogram of staleness for each run with recorded staleness; None if no run has any."""
    shown = [one for one in series if one.record.summary.staleness_counts]
    if not shown:
        return None
    titles = [one.title(32) for one in shown]
    columns = min(4, len(shown))
    panels = Panels(len(shown), columns, title_px=title_px(titles), panel_px=120, bottom_px=56)
    largest = max(one.record.summary.staleness_max or 0 for one in shown)
    width = max(1, -(-(largest + 1) // _MOST_BARS))
    data, notes = [], []
    made: dict[str, Any] = {}
    for index, one in enumerate(shown):
        data.append(_histogram(one, index, width))
        x = {"range": [-0.6 * width, largest + 0.6 * width], **({"dtick": 1} if largest < 9 else {})}
        y = {"tickformat": ".0%", "rangemode": "tozero", "matches": "y" if index else None, "nticks": 4}
        made |= panels.axes(index, "staleness [updates]", "share of updates", x, y)
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
