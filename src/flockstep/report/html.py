"""Writes an HTML page that compares runs: findings, table, figures and settings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flockstep.errors import ConfigurationError
from flockstep.messages import node_name
from flockstep.records.config import SPLIT, MetricTarget, RunConfig
from flockstep.records.events import ClockEvent
from flockstep.records.flight import last_heard
from flockstep.records.folder import Record
from flockstep.records.summary import LACKS
from flockstep.report import figures, formatting
from flockstep.report.findings import apart, findings, ties
from flockstep.report.medians import RepeatedRuns, caveats, spreads
from flockstep.report.page import Drawing, filled, write
from flockstep.report.prediction import COLUMNS, Prediction
from flockstep.report.ranking import labels, measured_alike, order, reference, require_comparable, unranked
from flockstep.report.style import ACTIVITIES, Series
from flockstep.report.table import compared_workers, gradient_notes, table
from flockstep.report.terminal import TextTable

_FACTS = (
    ("workers", "workers"),
    ("cluster", "cluster"),
    ("network", "network"),
    ("compute", "compute time"),
    ("seed", "seed"),
    ("batch", "batch per worker"),
    ("steps", "steps per worker"),
    ("epochs", "epochs"),
    ("lr", "learning rate"),
    ("schedule", "schedule"),
    ("split", "data split"),
    ("partition", "partition"),
    ("transport", "transport"),
    ("threads", "threads per process"),
)
_PROGRESS = (
    "The same runs at equal time, equal bytes and equal {third}. A ring marks the first evaluation that reached the "
    "target. Click a name to hide or show a run in all plots; drag to zoom, double-click to reset."
)
_OF_SCRIPTS = (
    " A script records its metrics itself: a value is the mean over the ranks weighted by their counts, or that of "
    "rank 0 if it has no count. The training loss is the mean over the workers, and over equally many steps for each "
    "point."
)
_PER_STEP = (
    "Accounted time of all workers divided by their number of steps. Communicating: the worker was blocked by a "
    "transfer. Waiting: the worker waited for other nodes."
)
_PER_WORKER = (
    "One bar per worker. Bars of unequal length within a panel show stragglers, or workers that wait for stragglers."
)
_STALENESS = (
    "Staleness: number of updates applied between reading the parameters and applying the gradient computed from them."
)
_TIMELINE = (
    "All runs on one time axis, with the first few workers and servers of each run; a gap means that nothing was "
    "recorded. "
    "Drag to zoom, double-click to reset."
)


def write_report(
    records: Sequence[Record],
    path: Path | str,
    predictions: Sequence[Prediction | None] = (),
    spread: tuple[Sequence[RepeatedRuns], Sequence[RepeatedRuns]] | None = None,
    target: MetricTarget | None = None,
) -> Path:
    """Write the page that compares runs to `path`, whose folder is created if it is missing, and return the path."""
    return write(render(records, predictions, spread, target), path)


def render(
    records: Sequence[Record],
    predictions: Sequence[Prediction | None] = (),
    spread: tuple[Sequence[RepeatedRuns], Sequence[RepeatedRuns]] | None = None,
    target: MetricTarget | None = None,
) -> str:
    """Return the page that compares runs, as text.

    Args:
        records: the runs, in any order.
        predictions: one for each record, in the same order; None for a run without a prediction.
        spread: groups of runs that differ only in their seed, and the groups whose learning rate is ranked. `records`
            has one record for each ranked group, whose summary is the group's median.
        target: the target to which times refer; None for the runs' own.
    """
    if not records:
        raise ConfigurationError("a report needs at least one run, got none; name the folder of a run")
    records = measured_alike(records, target)
    summaries = [record.summary for record in records]
    require_comparable(summaries)
    ranking = order(summaries)
    ranked = [records[index] for index in ranking]
    summaries = [record.summary for record in ranked]
    alone, known = reference(summaries), unranked(summaries) is None
    named = zip(labels(summaries), ranked, strict=True)
    series = [
        Series(label, record, place, alone=record.summary is alone) for place, (label, record) in enumerate(named)
    ]
    configs = [record.config for record in ranked]
    notes = [*gradient_notes(configs), *([] if spread is None else caveats(*spread))]
    seeds = 1 if spread is None else max(len(group.runs) for group in spread[1])
    told = predictions or [None] * len(records)
    further = [] if spread is None else [("spread", spreads(*spread))]
    if pairs := [(one.label, found) for one, index in zip(series, ranking, strict=True) if (found := told[index])]:
        further.append(("predicted", TextTable.of(COLUMNS, pairs, title="Predicted and measured")))
    counts = compared_workers(summaries)
    workers = " and ".join(map(str, counts)) + (" worker" if counts == [1] else " workers")
    runs = "1 run" if len(series) == 1 else f"{len(series)} runs"
    return filled(
        "report.html.j2",
        title=f"{summaries[0].job} on {workers}: {runs} compared",
        clock=ranked[0].summary.clock,
        facts=_facts(configs, [] if spread is None else [run.seed for group in spread[0] for run in group.runs]),
        findings=[
            *findings(summaries, seeds),
            *apart(summaries),
            *(f"{one.label}: {note}" for one in series for note in one.record.summary.notes if note.startswith(LACKS)),
            *map(_sentence, notes),
        ],
        table_of_runs=replace(table(summaries), notes=ties(summaries, seeds) if known else ()),
        further=further,
        series=series,
        colors=[one.color for one in series],
        ranked=known,
        troubles=_troubles(series),
        activities=list(ACTIVITIES.values()),
        drawings=_drawings(series),
        runs=[(one, one.record.config.command, one.record.config.to_toml()) for one in series],
    )


def _sentence(text: str) -> str:
    """Return a note as a sentence; a component at its beginning, such as grid(2, 2), is not capitalized."""
    begin = text if re.match(r"\w+\(", text) else f"{text[:1].upper()}{text[1:]}"
    return begin if begin.endswith(".") else f"{begin}."


def _facts(configs: Sequence[RunConfig], seeds: Sequence[int]) -> list[tuple[str, str]]:
    """Settings of the runs, one value if all agree; `seeds` are those of all runs, of which `configs` are some."""
    found: list[tuple[str, str]] = []
    configs = [config for config in configs if config.workers in compared_workers(configs)]
    modeled = () if any(config.cluster is None for config in configs) else ("network", "compute")
    for name, text in _FACTS:
        if name in modeled:  # derived from the cluster; the runs' settings have them in full
            continue
        if name == "split" and configs[0].kind == "launch":  # scripts divide their data themselves
            continue
        values: list[Any] = list(dict.fromkeys(getattr(config, name) for config in configs))
        if name == "seed" and seeds:
            values = sorted(set(seeds))
        if values and values != [None]:
            shown = [f"{v:g}" if isinstance(v, float) else "the job's own" if v is None else str(v) for v in values]
            found.append((text, shown[0] if len(shown) == 1 else "differs: " + "; ".join(shown)))
    versions = {f"{name} {version}" for config in configs for name, version in config.versions.items() if name != SPLIT}
    return [*found, *([("versions", ", ".join(sorted(versions)))] if versions else [])]


def _troubles(series: Sequence[Series]) -> list[tuple[Series, str, list[str]]]:
    """Runs that did not finish or lost nodes: the series, what happened, and details."""
    found = []
    for one in series:
        summary, what, details = one.record.summary, "the run finished, but lost nodes", list[str]()
        for lost in summary.lost:
            details.append(f"{node_name(lost.node)} lost after {formatting.seconds(lost.seconds)}: {lost.reason}")
            details += last_heard(one.record.flight, lost)
        if summary.status != "finished":
            what = f"{summary.status} after {formatting.seconds(summary.seconds)}"
            details[:0] = filter(None, [summary.error])
        if details or summary.status != "finished":
            found.append((one, what, details))
    return found


def _drawings(series: Sequence[Series]) -> list[Drawing]:
    drawn = []
    if shown := figures.names(series):
        third = figures.axes_across(series)[2][0].split()[0].removesuffix(",")
        title = f"{formatting.listed(shown)} against seconds, bytes and {third}"
        caption = _PROGRESS.format(third=third) + (_OF_SCRIPTS if third == "steps" else "")
        drawn.append(Drawing("progress", f"{title[:1].upper()}{title[1:]}", caption, figures.progress(series)))
    if any(one.record.summary.steps for one in series):
        drawn.append(Drawing("per-step", "Time per local step of a worker", _PER_STEP, figures.per_step(series)))
        drawn.append(Drawing("per-worker", "How each worker spent its time", _PER_WORKER, figures.per_worker(series)))
    if (histogram := figures.staleness(series)) is not None:
        without = [one.label for one in series if not one.record.summary.staleness_counts]
        note = f" No staleness was recorded for these runs: {', '.join(without)}." if without else ""
        drawn.append(Drawing("staleness", "Staleness of updates", _STALENESS + note, histogram))
    if (first := figures.timeline(series)) is not None:
        caption = _TIMELINE
        clocks = [e.uncertainty_seconds for one in series for e in one.record.events if isinstance(e, ClockEvent)]
        if clocks:  # of a real run
            caption += (
                " The clock of every node agrees with the launcher's clock to within "
                f"{formatting.seconds(max(clocks))}, as measured at the start."
            )
        drawn.append(Drawing("timeline", "Timeline of the first steps", caption, first))
    return drawn
