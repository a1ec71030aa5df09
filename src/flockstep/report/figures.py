"""Figures of the quality of training: metric and loss against seconds, bytes and samples; staleness of updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flockstep.records.events import EvaluationEvent
from flockstep.records.summary import Summary, reaches
from flockstep.report.style import INK, NARROW, Figure, Panels, Series, axis, key, layout, ref, title_px

_X: tuple[tuple[str, Callable[[EvaluationEvent], float]], ...] = (
    ("seconds", lambda s: s.seconds),
    ("MB sent per worker", lambda s: s.sent_bytes / 1e6),
    ("samples, all workers", lambda s: float(s.samples)),
)
_MOST_BARS = 40


def progress(series: Sequence[Series], narrow: bool = False) -> Figure:
    """Return a figure of six plots: metric and loss (rows) against seconds, bytes and samples (columns).

    If `narrow` is set, the plots are one below the other.

    The vertical axes leave out the values that all runs have in common at the beginning. A ring marks the point at
    which a run reached the target. A trace's legendgroup is the rank of its run, which the legend of the page uses.
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
        1500 if narrow else 710,
        shapes=shapes,
        annotations=_target_note(first),
        showlegend=False,
        margin={"l": 64, "r": 12 if narrow else 24, "t": 16, "b": 56},
        hovermode="closest",
        **_axes(first, _losses(series), narrow, ranges(series), _last_second(series)),
    )
    return {"data": data, "layout": made}


def _curves(one: Series) -> list[dict[str, Any]]:
    snapshots = [event for event in one.record.events if isinstance(event, EvaluationEvent)]
    summary = one.record.summary
    # not the summary's time, which is a median if the strategy has several runs
    hit = next((s for s in snapshots if reaches(one.record.config, s.metric)), None)
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


def _axes(
    first: Summary, losses: Sequence[float], narrow: bool, views: dict[str, Ranges], last: float | None
) -> dict[str, Any]:
    log = _logarithmic(losses)
    titles = (first.metric, "test loss (log)" if log else "test loss")
    made: dict[str, Any] = {}
    for panel in range(6):
        row, column = divmod(panel, 3)
        across, up = _place(row, column, narrow)
        x_title = "virtual seconds" if column == 0 and first.clock == "virtual" else _X[column][0]
        until = {} if column or last is None else {"range": [0, last]}
        made[key("x", panel)] = axis(x_title, domain=across, anchor=ref("y", panel), rangemode="tozero", **until)
        own = key("y", panel)
        made[own] = axis(
            titles[row] if narrow or column == 0 else "",
            domain=up,
            anchor=ref("x", panel),
            showticklabels=narrow or column == 0,
            **({"matches": ref("y", 3 * row)} if column else {}),
            **({"type": "log", "tickvals": _log_ticks(views[own]), "tickformat": ".4~g"} if row and log else {}),
            **({"range": views[own].differing} if own in views else {}),
        )
        if row == 0:
            made[key("x", panel)]["matches"] = ref("x", panel + 3)
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


def _place(row: int, column: int, narrow: bool) -> tuple[list[float], list[float]]:
    """Horizontal and vertical range of a plot, as shares of the plotting area."""
    if narrow:
        top = 1 - (2 * column + row) / 6
        return [0.0, 1.0], [top - 0.118, top]
    left, bottom = column * 0.345, 0.0 if row else 0.53
    return [left, min(left + 0.31, 1.0)], [bottom, bottom + 0.47 - 0.06 * row]


def _logarithmic(losses: Sequence[float]) -> bool:
    return bool(losses) and min(losses) > 0


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
    log = _logarithmic(_losses(series))
    found: dict[str, Ranges] = {}
    for row, of in enumerate((_metric, _loss)):
        curves = [(one.record.summary.useful, _values(one, of, log and row == 1)) for one in series]
        aim = [first.target] if row == 0 and first.target is not None else []
        values = [value for _, curve in curves for value in curve] + aim
        if values:
            useful = [curve for is_useful, curve in curves if is_useful]
            shared = _shared(useful)
            differing = [value for curve in useful for value in curve[shared:]] + aim
            made = Ranges(_around(values), _around(differing or values))
            found |= {key("y", 3 * row + column): made for column in range(3)}
    return found


def _values(one: Series, of: Callable[[EvaluationEvent], float | None], log: bool) -> list[float]:
    found = [value for e in one.record.events if isinstance(e, EvaluationEvent) if (value := of(e)) is not None]
    return [math.log10(value) for value in found] if log else found


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
