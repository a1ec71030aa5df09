"""The curves of a run, computed from its events: each metric and the loss, over seconds, steps and bytes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from flockstep.records.config import RunConfig
from flockstep.records.events import EvaluationEvent, Event, MetricEvent, StepEvent

TEST_LOSS, TRAINING_LOSS = "test loss", "training loss"
"""Names of the curves of losses: of the evaluations of a job, and of the mini-batches of a script."""
MOST_LOSSES = 250
"""Largest number of points of the curve of the training loss; each point is the mean over equally many steps."""


class CurvePoint(NamedTuple):
    """A value of a curve, with its place on each horizontal axis."""

    seconds: float
    step: float
    """Number of local steps of a worker."""
    sent_bytes: float
    """Bytes sent per worker so far."""
    value: float
    samples: int | None = None
    """Samples used by all workers; None in a run of a script, which does not tell them."""


@dataclass(frozen=True)
class MetricCurve:
    """The values of one name during a run, in order of time."""

    name: str
    higher_is_better: bool
    points: Sequence[CurvePoint]
    is_loss: bool = False
    """Whether the curve is a loss that training minimizes. Runs are ranked by metrics, never by a loss."""

    @property
    def finite(self) -> list[float]:
        """The values that are finite."""
        return [point.value for point in self.points if math.isfinite(point.value)]

    def first_reaching(self, target: float | None) -> CurvePoint | None:
        """Return the first point whose value is as good as `target`; None if no value is, or there is no target."""
        if target is None:
            return None
        higher = self.higher_is_better
        return next((p for p in self.points if (p.value >= target if higher else p.value <= target)), None)


def curves(config: RunConfig, events: Iterable[Event]) -> list[MetricCurve]:
    """Return the curves of a run whose `events` are sorted by time: its metrics, then its loss.

    A job has one metric, of which each evaluation holds a value and the test loss. A script has the metrics that it
    has recorded, in the order of their first values, and the training loss if it has recorded losses.
    """
    events = list(events)
    shots = [event for event in events if isinstance(event, EvaluationEvent)]
    if shots:
        metric = [CurvePoint(s.seconds, s.step, s.sent_bytes, s.metric, s.samples) for s in shots]
        loss = [CurvePoint(s.seconds, s.step, s.sent_bytes, s.loss, s.samples) for s in shots]
        name = config.metric or "metric"
        return [MetricCurve(name, config.higher_is_better, metric), MetricCurve(TEST_LOSS, False, loss, is_loss=True)]
    steps = [event for event in events if isinstance(event, StepEvent)]
    times, totals = [event.seconds for event in steps], [0, *accumulate(event.sent_bytes for event in steps)]

    def sent(seconds: float) -> float:
        """Bytes that a worker has sent until then, as the mean over the workers."""
        return totals[bisect_right(times, seconds)] / config.workers

    means = MetricMeans(config.workers)
    recorded = [m for event in events if isinstance(event, MetricEvent) for m in means.add(event)]
    recorded = sorted([*recorded, *means.rest()], key=lambda event: event.seconds)
    found = []
    for name in dict.fromkeys(event.name for event in recorded):
        own = [event for event in recorded if event.name == name]
        points = [CurvePoint(event.seconds, event.step, sent(event.seconds), event.value) for event in own]
        found.append(MetricCurve(name, own[-1].higher_is_better, points))
    return [*found, *_training_loss(steps, sent)]


def _training_loss(steps: Iterable[StepEvent], sent: Callable[[float], float]) -> Iterator[MetricCurve]:
    """Mean over the workers, and over equally many steps for each point."""
    known = [event for event in steps if event.loss is not None]
    if not known:
        return
    width = -(-max(event.step for event in known) // MOST_LOSSES)
    groups: dict[int, list[StepEvent]] = {}
    for event in known:
        groups.setdefault((event.step - 1) // width, []).append(event)
    points = [
        CurvePoint(last.seconds, last.step, sent(last.seconds), math.fsum(e.loss or 0.0 for e in group) / len(group))
        for group in groups.values()
        for last in [max(group, key=lambda event: event.seconds)]
    ]
    yield MetricCurve(TRAINING_LOSS, False, sorted(points), is_loss=True)


class MetricMeans:
    """Combines what the ranks record of a metric: values with counts become their weighted mean, as soon as all ranks
    have recorded a step; values without a count are those of rank 0, and are passed on as they are.
    """

    def __init__(self, workers: int):
        self._workers = workers
        self._recorded: Counter[tuple[str, int, int]] = Counter()
        self._open: dict[tuple[str, int, int], list[MetricEvent]] = {}

    def add(self, event: MetricEvent) -> Iterator[MetricEvent]:
        """Yield the values that are complete with this event. The events of one rank must be in order."""
        if event.count is None:
            yield event
            return
        self._recorded[event.name, event.step, event.rank] += 1  # a script may record a step again, as after finish()
        key = event.name, event.step, self._recorded[event.name, event.step, event.rank]
        self._open.setdefault(key, []).append(event)
        if len(self._open[key]) == self._workers:
            # All ranks have passed the earlier steps too, so a rank that has not recorded one of them never will.
            for earlier in [other for other in self._open if other[0] == event.name and other[1:] <= key[1:]]:
                yield from _mean(self._open.pop(earlier))

    def rest(self) -> Iterator[MetricEvent]:
        """Yield the means of steps that some ranks have not recorded, at the end of the run."""
        for group in self._open.values():
            yield from _mean(group)
        self._open.clear()


def _mean(group: Sequence[MetricEvent]) -> Iterator[MetricEvent]:
    """Mean of values weighted by their counts; nothing if no rank has counted anything."""
    total = math.fsum(event.count or 0.0 for event in group)
    if total > 0:
        value = math.fsum(event.value * event.count for event in group if event.count) / total
        last = max(group, key=lambda event: event.seconds)
        yield MetricEvent(last.seconds, 0, last.step, last.name, value, last.higher_is_better, total)
