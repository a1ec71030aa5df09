"""The terminal table of ranked runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flockstep.records.config import RunConfig
from flockstep.records.summary import Summary, partition_notes, trained_apart
from flockstep.report import formatting
from flockstep.report.ranking import labels, places, rank, reference, tied, unranked
from flockstep.report.terminal import TableColumn, TextTable

_STYLES = {"finished": "green", "interrupted": "yellow", "diverged": "red", "failed": "red"}


def columns(summary: Summary, alone: Summary | None = None) -> tuple[TableColumn, ...]:
    """Return the columns of the ranked table; all rows have the clock and the metric of `summary`.

    If the table has a run of one worker, `alone`, and a target, two columns compare each run with it.
    """
    metric, goal = summary.metric, _goal(summary)
    against = (
        TableColumn("speed-up over one worker", rank=1, note=_SPEEDUP),
        TableColumn("worker-seconds", rank=7, note=_WORKER_SECONDS),
    )
    reached = f"seconds to {goal}: until the first evaluation that reached the target; > if no evaluation reached it."
    return (
        TableColumn("#"),
        TableColumn("strategy", text=True),
        TableColumn(f"seconds to {goal or 'the end'}", note=reached if goal else ""),
        *(against if goal and alone else ()),
        *([] if metric is None else [TableColumn(f"final {metric}")]),
        TableColumn("MB per worker sent / received", rank=2),
        TableColumn("staleness mean / max", rank=4, note=_STALENESS),
        TableColumn("computing", rank=3, note=_COMPUTING),
        TableColumn("divergence", rank=5, note=_DIVERGENCE),
        TableColumn("updates applied", rank=6, note=_APPLIED),
        TableColumn("status", text=True, rank=1),
    )


_SPEEDUP = "speed-up over one worker: seconds to the target of one worker alone ÷ those of the strategy."
_WORKER_SECONDS = "worker-seconds: seconds to the target × workers, which is what a cluster is paid for."
_STALENESS = "staleness: number of updates applied between reading the parameters and applying the gradient."
_COMPUTING = "computing: share of a worker's time; the rest is communicating and waiting."
_DIVERGENCE = "divergence: root mean square distance of the replicas from their mean at the last evaluation."
_APPLIED = (
    "updates applied: share of the workers' updates that entered the models of the other workers, or of the servers. "
    "A finished run can stay below 100 % if workers exchange with few workers at a time, or drop updates."
)


def cells(place: str, label: str, summary: Summary, alone: Summary | None = None) -> list[str]:
    """Return the cells of a run's row as texts, in the order of `columns`.

    For a run that missed the target, the time is the run's total time.
    """
    return [
        place if summary.useful else formatting.NONE,
        label,
        _time(summary),
        *(
            []
            if alone is None or _goal(summary) is None
            else [_speedup(summary, alone), _time(summary, summary.workers)]
        ),
        *([] if summary.metric is None else [formatting.metric(summary.final_metric)]),
        "/".join(
            formatting.number(count / 1e6)
            for count in (summary.sent_bytes_per_worker, summary.received_bytes_per_worker)
        ),
        formatting.staleness(summary),
        formatting.share(summary.utilization),
        formatting.number(summary.divergence),
        formatting.share(summary.completeness),
        summary.status,
    ]


def _goal(summary: Summary) -> str | None:
    """The target with its metric, such as "accuracy 0.95"; None if the run has no target, or no metric."""
    return None if summary.target is None or summary.metric is None else f"{summary.metric} {summary.target:g}"


def _time(summary: Summary, workers: int = 1) -> str:
    if summary.seconds_to_target is not None:
        return formatting.number(workers * summary.seconds_to_target)
    text = formatting.number(workers * summary.seconds)
    return text if _goal(summary) is None else f"> {text}"


def _speedup(summary: Summary, alone: Summary) -> str:
    """Speed-up over one worker; a bound if one of the two runs ended before the target, a dash if both did."""
    own, single = summary.seconds_to_target, alone.seconds_to_target
    if own is not None:
        return formatting.number(single / own) if single is not None else f"> {formatting.number(alone.seconds / own)}"
    return formatting.NONE if single is None else f"< {formatting.number(single / summary.seconds)}"


def apart(ranked: Sequence[Summary]) -> list[str]:
    """Return sentences about runs in which some workers exchanged no data with the others."""
    return [
        f"{label}: {sentence[:1].lower()}{sentence[1:]}"
        for label, sentence in zip(labels(ranked), map(trained_apart, ranked), strict=True)
        if sentence is not None
    ]


def over_one_worker(ranked: Sequence[Summary], seeds: int = 1) -> list[str]:
    """Say whether several workers were faster than one, which is the first question about a cluster; nothing without a
    run of one worker, or if no run reached the target.
    """
    alone = reference(ranked)
    hits = [(label, run) for label, run in zip(labels(ranked), ranked, strict=True) if run.useful and _hit(run)]
    if alone is None or not hits:
        return []
    goal = _goal(alone)
    if not (alone.useful and _hit(alone)):
        return [f"One worker alone did not reach {goal} in {formatting.seconds(alone.seconds)}."]
    strategies = [(label, run) for label, run in hits if run.workers > 1]
    if not strategies:
        return [f"One worker alone reached {goal}, after {_clock(alone)}, and no strategy on several workers did."]
    name, best = min(strategies, key=lambda one: _hit(one[1]))
    took = f"{name} reached {goal} after {_clock(best)}, one worker alone after {_clock(alone)}"
    if _hit(best) >= _hit(alone):
        return [f"No strategy was faster than one worker: {took}."]
    if tied(best, alone):
        why = "the ranges of their seeds overlap" if seeds > 1 else "the evaluations are too far apart to tell"
        return [f"No strategy is known to be faster than one worker: {took}, but {why}."]
    paid = formatting.times(_hit(best) * best.workers / _hit(alone))
    return [f"Several workers were faster than one: {took}, with {paid} the worker-seconds."]


def _hit(run: Summary) -> float:
    """Seconds in which a run reached the target; 0 if it did not."""
    return run.seconds_to_target or 0.0


def _clock(run: Summary) -> str:
    text = formatting.seconds(run.seconds_to_target)
    return text.replace(" ", " virtual ", 1) if run.clock == "virtual" else text


def ties(ranked: Sequence[Summary], seeds: int = 1) -> list[str]:
    """Return sentences about how certain the order of the ranked runs is; `seeds` is the number of runs of each
    strategy.
    """
    if (why := unranked(ranked)) is not None:
        return [why]
    said = []
    if any("=" in place for place in places(ranked)):
        said.append(
            "=: a tie, because the ranges over the seeds overlap."
            if seeds > 1
            else "=: a tie, because the evaluations are too far apart to tell which run was first."
        )
    if seeds == 1 and len(ranked) > 1 and ranked[0].clock == "real":
        said.append(
            "Each strategy has only one run, so the variation of the seconds is not known; --seeds 5 ranks "
            "medians and shows ranges."
        )
    return said


def modeled(summaries: Sequence[Summary]) -> str:
    """Return the cluster or the compute model that all simulated runs share, for a heading.

    If the runs differ, their labels name the models.
    """
    clusters = {summary.cluster for summary in summaries}
    if clusters != {None}:
        return f"on the cluster {clusters.pop()}" if len(clusters) == 1 else "time is modeled"
    laws = {summary.compute for summary in summaries}
    return f"a gradient takes {laws.pop()}" if len(laws) == 1 and None not in laws else "time is modeled"


def gradient_notes(configs: Iterable[RunConfig]) -> list[str]:
    """Sentences about simulations that could not batch the gradients of several workers, and about what partitions
    change.
    """
    configs = list(configs)
    said = {config.versions.get("gradients", "batched") for config in configs} - {"batched"}
    return [
        f"gradients were computed {how}; seconds are virtual, but the simulation itself takes longer"
        for how in sorted(said)
    ] + sorted({note for config in configs for note in partition_notes(config)})


def table(summaries: Sequence[Summary], seeds: int = 1) -> TextTable:
    """Return the terminal table of ranked runs; without runs, the table is empty.

    Raises:
        ConfigurationError: the runs cannot be compared.
    """
    ranked = rank(summaries)
    if not ranked:
        return TextTable((), (), "no runs")
    first, alone = ranked[0], reference(ranked)
    rows = [cells(*row, alone) for row in zip(places(ranked), labels(ranked), ranked, strict=True)]
    shown = columns(first, alone)
    return TextTable(
        shown,
        rows,
        title=heading(ranked),
        styles={0: "bold"} if first.useful and unranked(ranked) is None else {},
        marks=_STYLES,
        notes=[*over_one_worker(ranked, seeds), *apart(ranked), *ties(ranked, seeds)],
    )


def compared_workers(runs: Sequence[Summary] | Sequence[RunConfig]) -> list[int]:
    """Return the numbers of workers of the runs, without the one worker with which runs of several are compared."""
    found = sorted({run.workers for run in runs})
    return found[1:] if len(found) > 1 and found[0] == 1 else found


def heading(summaries: Sequence[Summary]) -> str:
    """Return the title of the table: job, number of workers, and the clock that measured the seconds."""
    first = summaries[0]
    clock = "real seconds" if first.clock == "real" else f"VIRTUAL seconds: {modeled(summaries)}"
    counts = " and ".join(map(str, compared_workers(summaries)))
    return f"{first.job} on {counts} worker{'' if counts == '1' else 's'}, {clock}"
