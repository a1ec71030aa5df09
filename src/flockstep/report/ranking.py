"""Ranks runs, and labels them so that they can be told apart."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from flockstep.errors import ConfigurationError
from flockstep.records.config import MetricTarget
from flockstep.records.curves import curves
from flockstep.records.folder import Record
from flockstep.records.summary import Summary, measure
from flockstep.report.formatting import NONE, listed

ONE_WORKER = "one worker"
"""Name of a run of one worker among runs of several workers, which tells what the other workers are worth."""
_MUST_AGREE = {"clock": "clocks", "job": "jobs", "target": "targets"}
RECORD_LINE = 'optimizer.record_metric("accuracy", value, higher_is_better=True)'
"""Line that a script needs so that its runs can be ranked."""


def rank(summaries: Sequence[Summary]) -> list[Summary]:
    """Sort runs, best first: runs that reach the target before those that do not, by time to target; then by final
    metric, then by bytes per worker.

    Runs that failed or diverged come last, because their final models are not reliable. Runs without a common metric
    keep their order, which is then no ranking. Runs that cannot be compared are refused.
    """
    require_comparable(summaries)
    return [summaries[index] for index in order(summaries)]


def order(summaries: Sequence[Summary]) -> list[int]:
    """Return the indices of the summaries in order of rank, best first; in the given order if nothing ranks them."""
    if unranked(summaries) is not None:
        return list(range(len(summaries)))

    def badness(index: int) -> tuple[bool, float, float, float, str, int]:
        one, metric = summaries[index], summaries[index].final_metric
        time = math.inf if one.seconds_to_target is None else one.seconds_to_target
        loss = math.inf if metric is None else -metric if one.higher_is_better else metric
        return not one.useful, time, loss, one.bytes_per_worker, one.strategy, one.seed

    return sorted(range(len(summaries)), key=badness)


def places(ranked: Sequence[Summary]) -> list[str]:
    """Return the place of each run of a ranking, such as "1" or, if runs tie, "2="; a dash if nothing ranks the runs.

    The place of a run is one more than the number of runs that were certainly faster. A run ties with another if the
    intervals of time in which the two runs reached the target overlap.
    """
    if unranked(ranked) is not None:
        return [NONE] * len(ranked)
    found = []
    for index, summary in enumerate(ranked):
        before = [tied(one, summary) for one in ranked[:index]]
        after = [tied(summary, one) for one in ranked[index + 1 :]]
        found.append(f"{1 + before.count(False)}{'=' * any(before + after)}")
    return found


def unranked(summaries: Sequence[Summary]) -> str | None:
    """Return a sentence that says why nothing ranks these runs, and what would; None if a common metric ranks them."""
    names = {summary.metric for summary in summaries}
    if not names or (len(names) == 1 and None not in names):
        return None
    way = f"add {RECORD_LINE} after each evaluation in the script"
    if len(summaries) == 1:
        return f"The run has recorded no metric, so nothing says how good its model is; {way}."
    if not any(summary.metrics for summary in summaries):
        return f"The runs are in no order, because none of them has recorded a metric; {way}."
    found = [
        f"{label} has recorded {listed(list(summary.metrics)) if summary.metrics else 'none'}"
        for label, summary in zip(labels(summaries), summaries, strict=True)
    ]
    return f"The runs are in no order, because no metric is common to all of them: {listed(found)}; {way}."


def measured_alike(records: Sequence[Record], target: MetricTarget | None = None) -> list[Record]:
    """Return the records with summaries that measure all runs by one metric and one target.

    The metric is the one of `target`, otherwise the one by which all runs are measured already, otherwise the first
    that all useful runs have recorded. Without such a metric no run has one. A metric of `target` that no run has
    recorded is refused.
    """
    summaries = [record.summary for record in records]
    if target is None and len({summary.metric for summary in summaries}) <= 1:
        return list(records)
    useful = [summary for summary in summaries if summary.useful] or summaries
    common = [name for name in useful[0].metrics if all(name in summary.metrics for summary in useful)]
    usual = useful[0].metric if len({summary.metric for summary in useful}) == 1 else next(iter(common), None)
    name = usual if target is None or target.metric is None else target.metric
    if target is not None and not any(name in summary.metrics for summary in useful):
        known = listed(list(dict.fromkeys(name for summary in useful for name in summary.metrics))) or "none"
        raise ConfigurationError(
            f"no run has recorded a value for the target {target}, recorded metrics: {known}; name one of them, or add "
            f"{RECORD_LINE} to the script"
        )
    alike = []
    for record in records:
        metrics = [curve for curve in curves(record.config, record.events) if name is not None and not curve.is_loss]
        goal = record.config.target if target is None else target.value
        config = dataclasses.replace(record.config, metric=name, target=goal)
        summary = msgspec.structs.replace(record.summary, **measure(config, metrics))
        alike.append(dataclasses.replace(record, summary=summary))
    return alike


def reference(summaries: Sequence[Summary]) -> Summary | None:
    """Return the best run of one worker among runs of several workers; None if there is none."""
    alone = [summary for summary in summaries if summary.workers == 1]
    return alone[order(alone)[0]] if 0 < len(alone) < len(summaries) else None


def names(summaries: Sequence[Summary]) -> list[str]:
    """Return for each run its strategy as it was given, or `ONE_WORKER` for one worker among runs of several."""
    several = any(summary.workers > 1 for summary in summaries)
    return [
        ONE_WORKER if several and summary.workers == 1 else summary.system or summary.strategy for summary in summaries
    ]


def tied(best: Summary, other: Summary) -> bool:
    """Return whether the intervals of time in which the better run and the other reached the target overlap."""
    first, second = best.seconds_to_target_range, other.seconds_to_target_range
    if first is None or second is None or not (best.useful and other.useful):
        return False
    return second[0] < first[1]


def require_comparable(summaries: Sequence[Summary]) -> None:
    """Raise `ConfigurationError` unless the times and the metrics of these runs are comparable."""
    for name, plural in _MUST_AGREE.items():
        found = {str(getattr(summary, name)) for summary in summaries}
        if len(found) > 1:
            raise ConfigurationError(
                f"runs with different {plural} are not comparable, got {' and '.join(sorted(found))}; rank the runs "
                "of each group separately"
            )


def labels(summaries: Sequence[Summary]) -> list[str]:
    """Return a unique label for each run: its strategy, and the settings in which runs of the same strategy differ."""
    found = names(summaries)
    for setting in ("strategy", "workers", "cluster", "network", "compute", "lr", "seed"):
        values = [getattr(summary, setting) for summary in summaries]
        twice = {name for name, count in Counter(found).items() if count > 1}
        differing = {name for name in twice if len({v for n, v in zip(found, values, strict=True) if n == name}) > 1}
        found = [
            f"{name} · {setting} {value}" if name in differing else name
            for name, value in zip(found, values, strict=True)
        ]
    seen: Counter[str] = Counter()
    numbered = []
    for name in found:
        seen[name] += 1
        numbered.append(f"{name} · #{seen[name]}" if seen[name] > 1 else name)
    return numbered
