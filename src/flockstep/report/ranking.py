"""Ranks runs, and labels them so that they can be told apart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from flockstep.errors import ConfigurationError
from flockstep.records.summary import Summary

ONE_WORKER = "one worker"
"""Name of a run of one worker among runs of several workers, which tells what the other workers are worth."""
_MUST_AGREE = {"clock": "clocks", "job": "jobs", "metric": "metrics", "target": "targets"}


def rank(summaries: Sequence[Summary]) -> list[Summary]:
    """Sort runs, best first: runs that reach the target before those that do not, by time to target; then by final
    metric, then by bytes per worker.

    Runs that failed or diverged come last, because their final models are not reliable.

    Raises:
        ConfigurationError: the runs cannot be compared: their clocks, jobs, metrics or targets differ.
    """
    require_comparable(summaries)
    return [summaries[index] for index in order(summaries)]


def order(summaries: Sequence[Summary]) -> list[int]:
    """Return the indices of the summaries in order of rank, best first."""
    return sorted(range(len(summaries)), key=lambda index: _key(summaries[index]))


def places(ranked: Sequence[Summary]) -> list[str]:
    """Return the place of each run of a ranking, such as "1" or, if runs tie, "2=".

    A run ties with the best run of a place if the intervals of time in which the two runs reached the target
    overlap.
    """
    found, best = list[int](), 0
    for index, summary in enumerate(ranked):
        best = best if index and tied(ranked[best], summary) else index
        found.append(best + 1)
    return [f"{place}=" if found.count(place) > 1 else str(place) for place in found]


def reference(summaries: Sequence[Summary]) -> Summary | None:
    """Return the run of one worker among runs of several workers, the best of them if there are several; None if there
    is none.
    """
    alone = [summary for summary in summaries if summary.workers == 1]
    return alone[order(alone)[0]] if 0 < len(alone) < len(summaries) else None


def names(summaries: Sequence[Summary]) -> list[str]:
    """Return for each run its strategy as it was given, or `ONE_WORKER` for one worker among runs of several."""
    several = any(summary.workers > 1 for summary in summaries)
    return [
        ONE_WORKER if several and summary.workers == 1 else summary.system or summary.strategy for summary in summaries
    ]


def tied(best: Summary, other: Summary) -> bool:
    """Return whether the intervals of time in which two runs reached the target overlap; the first run is the better
    one.
    """
    if (
        not (best.useful and other.useful)
        or best.seconds_to_target_range is None
        or other.seconds_to_target_range is None
    ):
        return False
    return other.seconds_to_target_range[0] < best.seconds_to_target_range[1]


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
    """Return a short, unique label for each run: its strategy, and the settings in which runs of the same strategy
    differ.
    """
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


def _key(summary: Summary) -> tuple[bool, float, float, float, str, int]:
    metric = summary.final_metric
    badness = math.inf if metric is None else -metric if summary.higher_is_better else metric
    time = math.inf if summary.seconds_to_target is None else summary.seconds_to_target
    return (not summary.useful, time, badness, summary.bytes_per_worker, summary.strategy, summary.seed)
