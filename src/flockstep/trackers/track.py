"""Copies a run's record into an experiment tracker while the run writes the record."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from flockstep.records.access import file_of
from flockstep.records.curves import MetricMeans
from flockstep.records.events import EvaluationEvent, Event, MetricEvent, ReplicaEvent, ScalarEvent, StepEvent
from flockstep.records.folder import ENDED, RunFolder, decode_events
from flockstep.records.owner import in_use
from flockstep.report.progress import ProgressCallback, silent
from flockstep.trackers.base import ExperimentTracker, Point

SECONDS = 0.5
"""Seconds between two reads of the events of a run that has not ended."""


def track(folder: Path | str, tracker: str | ExperimentTracker, say: ProgressCallback = silent) -> int:
    """Copy the curves of the run in `folder` into an experiment tracker. If the run is in progress, follow the run
    until it ends.

    Args:
        folder: the folder of a run, which may still be running on this host.
        tracker: an expression such as "tensorboard" or "mlflow(uri='http://host:5000')", or a tracker.
        say: function that is called with the number of points so far, whenever there are new points.

    Returns:
        The number of points that were copied.

    Raises:
        ConfigurationError: the folder holds no run, or the settings of the tracker are invalid.
        MissingDependency: the tracker's package is not installed.
    """
    record, into = RunFolder(folder), ExperimentTracker.parse(tracker)
    config = record.read_config()
    name, sent, steps = record.path.absolute().name, 0, Counter[str]()
    settings = {  # those that differ from their defaults
        key: str(value) for key, value in msgspec.to_builtins(config).items() if value not in (None, "", (), [], {})
    }
    run = into.begin(name, settings, record.config_file.stat().st_mtime)
    metric, failed = config.metric or "metric", True
    try:
        for events in _with_means(follow(record), MetricMeans(config.workers)):
            points = [point for event in events for point in _points(event, metric, steps)]
            run.log(points)
            if points:
                sent += len(points)
                say(f"{sent} points")
        failed = record.read_summary().status not in ENDED[:1]
    finally:
        run.end(failed)
    return sent


def _with_means(parts: Iterable[list[Event]], means: MetricMeans) -> Iterator[list[Event]]:
    """The events, in which the values of a metric that ranks have recorded are combined."""
    for events in parts:
        combined = [mean for event in events if isinstance(event, MetricEvent) for mean in means.add(event)]
        yield [*(event for event in events if not isinstance(event, MetricEvent)), *combined]
    yield [*means.rest()]


def _points(event: Event, metric: str, scalars: Counter[str]) -> Iterator[Point]:
    """The point that an event adds; `scalars` counts the points of curves whose events have no step."""
    match event:
        case StepEvent():
            times = {"wait_seconds": event.wait_seconds, "comm_seconds": event.comm_seconds}
            values = {"compute_seconds": event.compute_seconds, **times, "sent_bytes": float(event.sent_bytes)}
            loss = {} if event.loss is None else {"loss": event.loss}
            yield Point(f"worker-{event.rank}", {**loss, **values}, event.step, event.seconds)
        case EvaluationEvent():
            spread = {} if event.divergence is None else {"divergence": event.divergence}
            values = {"loss": event.loss, metric: event.metric, "sent_bytes_per_worker": event.sent_bytes, **spread}
            yield Point("evaluation", values, round(event.step), event.seconds)
        case MetricEvent():
            yield Point("evaluation", {event.name: event.value}, event.step, event.seconds)
        case ReplicaEvent():
            values = {"loss": event.loss, metric: event.metric}
            yield Point(f"replica-{event.rank}", values, 0, event.seconds)
        case ScalarEvent():
            group = f"{file_of(event.node)}-scalars"
            scalars[f"{group}/{event.name}"] += 1
            yield Point(group, {event.name: event.value}, scalars[f"{group}/{event.name}"], event.seconds)


def follow(record: RunFolder, pause: Callable[[], None] = lambda: time.sleep(SECONDS)) -> Iterator[list[Event]]:
    """Yield the events in the folder, then those that are added, until the run has ended; `pause` in between.

    The events of one node are in order; events of different nodes are not.
    """
    read: Counter[Path] = Counter()
    yielded: Counter[tuple[type[Event], int | None]] = Counter()
    while True:
        ended = record.summary_file.exists() or not in_use(record.path)
        files = sorted((record.path / "events").glob("*.jsonl"))
        events = [event for file in files for event in _added(file, read)]
        yielded.update(map(_key, events))
        if record.events_file.exists():  # the run has merged its files: the first events of each node are known
            for event in _added(record.events_file, read):
                yielded[_key(event)] -= 1
                if yielded[_key(event)] < 0:
                    events.append(event)
        yield events
        if ended:
            return
        pause()


def _added(file: Path, read: Counter[Path]) -> list[Event]:
    """The events in whole lines after the first `read[file]` bytes."""
    try:
        with file.open("rb") as lines:
            lines.seek(read[file])
            whole, newline, _ = lines.read().rpartition(b"\n")
    except FileNotFoundError:  # the run has just merged its files
        return []
    read[file] += len(whole) + len(newline)
    return decode_events(whole, file) if whole else []


def _key(event: Event) -> tuple[type[Event], int | None]:
    """Kind and node of an event: events of equal keys are in one file."""
    return type(event), getattr(event, "rank", getattr(event, "node", None))
