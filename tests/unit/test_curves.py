"""Metrics that scripts record: their curves, how runs are measured by them, and what trackers receive."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flockstep.errors import ConfigurationError
from flockstep.records import RunConfig, summarize
from flockstep.records.config import MetricTarget
from flockstep.records.curves import MOST_LOSSES, curves
from flockstep.records.events import Event, MetricEvent, StepEvent
from flockstep.records.folder import EventWriter, Record, RunFolder
from flockstep.records.summary import Status
from flockstep.report.figures import names, progress
from flockstep.report.html import render
from flockstep.report.ranking import measured_alike, order, unranked
from flockstep.report.style import Series
from flockstep.report.table import table
from flockstep.trackers.base import ExperimentTracker, Point, TrackedRun
from flockstep.trackers.track import track

CONFIG = RunConfig(kind="launch", job="mine.py", strategy="all_reduce", workers=2)
LINE = 'optimizer.record_metric("accuracy", value, higher_is_better=True)'


def step(number: int, rank: int = 0, loss: float | None = None) -> StepEvent:
    return StepEvent(float(number), rank, number, loss, 0.0, 0.0, 0.0, 100, 100, 1, 1)


def metric(number: int, value: float, name: str = "accuracy", rank: int = 0, count: float | None = None) -> MetricEvent:
    return MetricEvent(number + 0.25 + rank / 10, rank, number, name, value, name != "perplexity", count)


def values(*events: Event) -> dict[str, list[tuple[float, float]]]:
    """Name of a curve → (step, value) of its points."""
    return {c.name: [(p.step, p.value) for p in c.points] for c in curves(CONFIG, events)}


def record(strategy: str, *events: Event, status: Status = "finished", target: float | None = None) -> Record:
    config = RunConfig(kind="launch", job="mine.py", strategy=strategy, workers=2, target=target)
    return Record(config, summarize(config, events, status), list(events))


def accuracies(*found: float) -> list[Event]:
    return [metric(10 * number, value) for number, value in enumerate(found, 1)]


def test_values_with_counts_are_their_weighted_mean_and_those_without_stand_alone() -> None:
    events = [metric(4, 0.5, rank=1, count=30), metric(4, 0.9, rank=0, count=10), metric(4, 0.8, "f1")]
    assert values(*events) == {"f1": [(4, 0.8)], "accuracy": [(4, pytest.approx(0.6))]}
    (accuracy,) = (one for one in curves(CONFIG, events) if one.name == "accuracy")
    assert accuracy.points[0].seconds == 4.35, "the mean is known when the last rank has recorded"


def test_a_rank_that_skips_a_step_is_left_out_of_its_mean() -> None:
    both = [metric(8, value, rank=rank, count=1) for rank, value in enumerate((0.4, 0.8))]
    found = values(metric(4, 0.5, rank=1, count=2), *both, metric(9, 0.7, rank=0, count=0))
    assert found == {"accuracy": [(4, 0.5), (8, pytest.approx(0.6))]}, "a mean of no samples is none"


def test_a_step_that_is_recorded_again_is_another_value() -> None:
    """A script records the last step in its loop, and the result after `finish`."""
    once = [metric(4, 0.4, rank=rank, count=1) for rank in (0, 1)]
    again = [MetricEvent(9.0 + rank, rank, 4, "accuracy", 0.8, True, 1.0) for rank in (0, 1)]
    assert values(*once, *again) == {"accuracy": [(4, 0.4), (4, 0.8)]}


def test_the_training_loss_is_a_mean_over_workers_and_steps() -> None:
    assert values(step(1, 0, 3.0), step(1, 1, 1.0), step(2, 0, None), step(3, 0, 0.5)) == {
        "training loss": [(1, 2.0), (3, 0.5)]
    }
    many = [step(number, loss=float(number)) for number in range(1, 3 * MOST_LOSSES + 1)]
    points = values(*many)["training loss"]
    assert len(points) == MOST_LOSSES
    assert points[0] == (3, 2.0)


def test_bytes_of_a_value_are_those_that_a_worker_has_sent_by_then() -> None:
    events = [step(1), step(1, 1), metric(1, 0.5), step(2), metric(2, 0.6)]
    (curve,) = curves(CONFIG, events)
    assert [point.sent_bytes for point in curve.points] == [100.0, 150.0]


def test_a_script_is_measured_by_its_own_metric_or_by_none() -> None:
    summary = summarize(CONFIG, [step(1), metric(1, 9.0, "perplexity"), metric(2, 4.0, "perplexity")], "finished")
    assert (summary.metric, summary.higher_is_better) == ("perplexity", False)
    assert (summary.final_metric, summary.best_metric, summary.metrics) == (4.0, 4.0, {"perplexity": 4.0})
    nothing = summarize(CONFIG, [step(1, loss=0.5)], "finished")
    assert (nothing.metric, nothing.final_metric, nothing.metrics, nothing.status) == (None, None, {}, "finished")


def test_a_metric_that_ends_as_nan_is_divergence() -> None:
    summary = summarize(CONFIG, [metric(1, 0.5), metric(2, math.nan)], "finished")
    assert (summary.status, summary.final_metric, summary.best_metric) == ("diverged", None, 0.5)


def test_runs_are_ranked_by_the_time_to_the_target_that_is_asked_for() -> None:
    slow, fast = record("slow", *accuracies(0.5, 0.7, 0.9, 0.91)), record("fast", *accuracies(0.85, 0.86))
    summaries = [one.summary for one in measured_alike([slow, fast])]
    assert order(summaries) == [0, 1], "without a target the final value counts"
    found = measured_alike([slow, fast], MetricTarget.parse("accuracy=0.8"))
    assert [one.summary.seconds_to_target for one in found] == [30.25, 10.25]
    assert order([one.summary for one in found]) == [1, 0]
    with pytest.raises(
        ConfigurationError, match=r"no run has recorded a value for the target f1=0\.8, recorded metrics: "
    ):
        measured_alike([slow, fast], MetricTarget.parse("f1=0.8"))


def test_a_metric_that_all_runs_have_measures_them() -> None:
    first = record("first", metric(1, 0.3, "f1"), metric(1, 0.6))
    second = record("second", metric(1, 0.7))
    lost = record("lost", status="failed")
    found = [one.summary for one in measured_alike([first, second, lost])]
    assert [one.metric for one in found] == ["accuracy"] * 3
    assert order(found) == [1, 0, 2]


def test_runs_without_a_common_metric_are_in_no_order() -> None:
    runs = [record("slow", step(1), metric(1, 0.3, "f1")), record("fast", step(1), metric(1, 0.6)), record("bare")]
    found = [one.summary for one in measured_alike(runs)]
    assert order(found) == [0, 1, 2]
    text = io.StringIO()
    Console(file=text, width=200, color_system=None).print(table(found))
    assert (
        "The runs are in no order, because no metric is common to all of them: slow has recorded f1, fast has recorded "
        f"accuracy and bare has recorded none; add {LINE} after each evaluation in the script."
    ) in " ".join(text.getvalue().split())
    assert "1 " not in [line[:2] for line in text.getvalue().splitlines()]
    assert "final" not in text.getvalue()
    bare = [record("one", step(1)), record("two", step(1), status="failed")]
    assert unranked([one.summary for one in bare]) == (
        f"The runs are in no order, because none of them has recorded a metric; add {LINE} after each evaluation in "
        "the script."
    )
    page = render(runs)
    assert ">Ranking<" not in page
    assert 'class="best"' not in page
    assert "data split" not in page


def test_a_page_of_scripts_has_a_row_of_plots_for_each_curve() -> None:
    runs = [
        record("one", *[step(n, loss=1.0 / n) for n in range(1, 21)], *accuracies(0.5, 0.9), metric(20, 0.1, "f1")),
        record("two", *accuracies(0.6, 0.7)),
    ]
    runs = measured_alike(runs, MetricTarget(0.8, "accuracy"))
    series = [Series(label, one, place) for place, (label, one) in enumerate(zip("ab", runs, strict=True))]
    assert names(series) == ["accuracy", "f1", "training loss"]
    figure = progress(series)
    drawn = [(trace["name"], trace["yaxis"]) for trace in figure["data"] if "hovertemplate" in trace]
    assert [axis for name, axis in drawn if name == "b"] == ["y", "y2", "y3"], "a run without a curve has no line"
    assert len([one for one in figure["data"] if one["mode"] == "markers" and one["yaxis"] == "y"]) == 1
    titles = [figure["layout"][f"xaxis{n}"]["title"]["text"] for n in (7, 8, 9)]
    assert titles == ["seconds", "MB sent per worker", "steps per worker"]
    beside = progress([series[0], replace(series[1], alone=True)])["layout"]
    assert [("range" in beside[f"xaxis{n}"], beside[f"xaxis{n}"].get("autorange")) for n in (7, 8, 9)] == [
        (True, None),
        (False, True),
        (False, True),
    ]


@dataclass(frozen=True)
class Collecting(ExperimentTracker):
    """A tracker that keeps what it receives."""

    points: list[Point] = field(default_factory=list)

    def begin(self, name: str, settings: Mapping[str, str], started: float) -> TrackedRun:
        return _Collected(self.points)


@dataclass
class _Collected(TrackedRun):
    points: list[Point]

    def log(self, points: Sequence[Point]) -> None:
        self.points.extend(points)

    def end(self, failed: bool) -> None:
        assert not failed


def test_trackers_receive_the_names_and_values_of_the_report(tmp_path: Path) -> None:
    events: list[Event] = [step(1, 0, 0.5), metric(1, 0.8, "f1")]
    events += [metric(n, 0.1 * n + rank, rank=rank, count=1 + rank) for n in (1, 2) for rank in (0, 1)]
    events += [metric(3, 0.7, rank=1, count=2)]
    folder = RunFolder(tmp_path)
    folder.write_config(CONFIG)
    with EventWriter(folder.events_file) as file:
        for event in events:
            file.write(event)
    folder.write_summary(summarize(CONFIG, events, "finished"))
    tracker = Collecting()
    track(tmp_path, tracker)
    sent: dict[str, Any] = {}
    for point in tracker.points:
        for name, value in point.named().items():
            sent.setdefault(name, []).append((point.step, value))
    assert sent["worker-0/loss"] == [(1, 0.5)]
    for name in ("accuracy", "f1"):
        assert sent[f"evaluation/{name}"] == values(*events)[name]
