"""Figures of the quality of training: metrics and losses against seconds, bytes and samples or steps; staleness of
updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flockstep.records.curves import CurvePoint
from flockstep.records.summary import Summary
from flockstep.report.style import INK, NARROW, Figure, Panels, Series, axis, key, layout, ref, safe, title_px

Axis = tuple[str, Callable[[CurvePoint], float | None]]
"""A horizontal axis: its title, and the place of a point on it."""
_SECONDS: Axis = ("seconds", lambda point: point.seconds)
_BYTES: Axis = ("MB sent per worker", lambda point: point.sent_bytes / 1e6)
_SAMPLES: Axis = ("samples, all workers", lambda point: point.samples)
_STEPS: Axis = ("steps per worker", lambda point: point.step)
_COLUMNS = 3
_ROW_PX, _GAP_PX = 319, 76
"""Height in pixels of a row of plots on a wide page, and of the titles between two rows."""
_NARROW_PX = 238
"""Height in pixels of a plot, with its titles, on a narrow page."""
_MOST_BARS = 40


def progress(series: Sequence[Series], narrow: bool = False) -> Figure:
    """Return a figure of three plots for each metric and loss (rows), against seconds, bytes, and samples or, where
    samples are not known, steps (columns).

    If `narrow` is set, the plots are one below the other.

    The vertical axes leave out the values that all runs have in common at the beginning. A ring marks the point at
    which a run reached the target. A trace's legendgroup is the rank of its run, which the legend of the page uses.
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
        72 + (_COLUMNS * _NARROW_PX if narrow else _ROW_PX) * len(shown),
        shapes=shapes,
        annotations=_target_note(first) if has_target else [],
        showlegend=False,
        margin={"l": 64, "r": 12 if narrow else 24, "t": 16, "b": 56},
        hovermode="closest",
        **_axes(series, narrow),
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


def _axes(series: Sequence[Series], narrow: bool) -> dict[str, Any]:
    shown, across, views = names(series), axes_across(series), ranges(series)
    virtual, last = series[0].record.summary.clock == "virtual", _last_second(series)
    made: dict[str, Any] = {}
    for panel in range(_COLUMNS * len(shown)):
        row, column = divmod(panel, _COLUMNS)
        x_domain, y_domain = _place(row, column, len(shown), narrow)
        log, view = _logarithmic(series, shown[row]), views[key("y", panel)]
        title = "virtual seconds" if column == 0 and virtual else across[column][0]
        # plotly leaves axes that it is not told to fit at [0, 6] as soon as one axis beside them has a range
        until = {"autorange": True} if column or last is None else {"range": [0, last]}
        made[key("x", panel)] = axis(title, domain=x_domain, anchor=ref("y", panel), rangemode="tozero", **until)
        made[key("y", panel)] = axis(
            (safe(shown[row]) + " (log)" * log) if narrow or column == 0 else "",
            domain=y_domain,
            anchor=ref("x", panel),
            showticklabels=narrow or column == 0,
            **({"matches": ref("y", _COLUMNS * row)} if column else {}),
            **({"type": "log", "tickvals": _log_ticks(view), "tickformat": ".4~g"} if log else {}),
            range=view.differing,
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


def _place(row: int, column: int, rows: int, narrow: bool) -> tuple[list[float], list[float]]:
    """Horizontal and vertical range of a plot, as shares of the plotting area."""
    if narrow:
        height = 1 / (rows * _COLUMNS)
        top = 1 - (rows * column + row) * height
        return [0.0, 1.0], [top - 0.7 * height, top]
    gap = _GAP_PX / (_ROW_PX * rows)
    height = (1 - gap * (rows - 1)) / rows
    left, top = column * 0.345, 1 - row * (height + gap)
    return [left, min(left + 0.31, 1.0)], [max(top - height, 0.0), top]


def _logarithmic(series: Sequence[Series], name: str) -> bool:
    """Whether the curves of this name are losses, all above 0."""
    found = [one.curves[name] for one in series if name in one.curves]
    return all(curve.is_loss and min(curve.finite) > 0 for curve in found)


def _log_ticks(view: Ranges) -> list[float]:
    """Ticks of a logarithmic axis: as few digits of each decade as leave three ticks where the runs differ.

    A range within which even nine digits leave fewer has ticks at equal distances there.
    """
    low, high = (10**end for end in view.differing)
    decades = range(math.floor(view.whole[0]), math.ceil(view.whole[1]) + 1)
    for digits in ((1,), (1, 2, 5), range(1, 10)):
        found = [float(f"{digit}e{decade}") for decade in decades for digit in digits]
        if sum(low <= tick <= high for tick in found) >= 3:
            return found
    step = 10 ** math.floor(math.log10((high - low) / 3))
    step *= max(times for times in (1, 2, 5) if (high - low) / (times * step) >= 3)
    near = [step * k for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return sorted([tick for tick in found if not low <= tick <= high] + near)


def _target_note(first: Summary) -> list[dict[str, Any]]:
    if first.target is None:
        return []
    text = f"target {first.target:g}"
    place = {"xref": "x3 domain", "yref": "y3", "x": 1, "y": first.target, "xanchor": "right"}
    below = {"yanchor": "top" if first.higher_is_better else "bottom", "showarrow": False, "font": {"size": 11}}
    return [{"text": text, **place, **below}]


@dataclass(frozen=True)
class Ranges:
    """Two ranges of a vertical axis: of all values, and of the values from where the runs differ.

    On a logarithmic axis, the ranges are exponents of ten.
    """

    whole: list[float]
    """Range that shows all values of the runs."""
    differing: list[float]
    """Range that shows all values from the first evaluation at which the runs differ."""


def ranges(series: Sequence[Series]) -> dict[str, Ranges]:
    """Return the ranges of each vertical axis of the figure `progress`, keyed by the axis's name.

    Failed and diverged runs do not widen the range of the differing values, because their last values dwarf all others.
    """
    first = series[0].record.summary
    found: dict[str, Ranges] = {}
    for row, name in enumerate(names(series)):
        scaled = math.log10 if _logarithmic(series, name) else float
        curves = [
            (one.record.summary.useful, [scaled(value) for value in one.curves[name].finite])
            for one in series
            if name in one.curves
        ]
        aim = [first.target] if name == first.metric and first.target is not None else []
        useful = [curve for is_useful, curve in curves if is_useful]
        shared = _shared(useful)
        differing = [value for curve in useful for value in curve[shared:]] + aim
        values = [value for _, curve in curves for value in curve] + aim
        made = Ranges(_around(values), _around(differing or values))
        found |= {key("y", _COLUMNS * row + column): made for column in range(_COLUMNS)}
    return found


def _shared(curves: Sequence[Sequence[float]]) -> int:
    """Number of values at the beginning that all curves have in common: those of the common initial model."""
    together = list(zip(*curves, strict=False)) if len(curves) > 1 else []
    return next((index for index, values in enumerate(together) if len(set(values)) > 1), 0)


def _around(values: Sequence[float]) -> list[float]:
    """Range of the values, with room for the line's width and for the ring at a run's target."""
    margin = 0.06 * (max(values) - min(values)) or 0.1 * abs(values[0]) or 1.0
    return [min(values) - margin, max(values) + margin]


def zooms(series: Sequence[Series]) -> bool:
    """Return whether a vertical axis of the figure `progress` shows only a part of its values."""
    return any(one.differing != one.whole for one in ranges(series).values())


def staleness(series: Sequence[Series], narrow: bool = False) -> Figure | None:
    """Return a histogram of staleness for each run with recorded staleness; None if no run has any."""
    shown = [one for one in series if one.record.summary.staleness_counts]
    if not shown:
        return None
    titles = [one.title(NARROW if narrow else 32) for one in shown]
    columns = min(2 if narrow else 4, len(shown))
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
