"""The table of ranked runs, for the terminal and the HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flockstep.records.config import RunConfig
from flockstep.records.summary import Summary, partition_notes
from flockstep.report import formatting
from flockstep.report.findings import apart, goal_of, over_one_worker, ties
from flockstep.report.ranking import labels, places, rank, reference, unranked
from flockstep.report.terminal import TableColumn, TextTable

_STYLES = {"finished": "green", "interrupted": "yellow", "diverged": "red", "failed": "red"}


class _Ranked(NamedTuple):
    """A run with its place and its label."""

    place: str
    label: str
    run: Summary


def columns(summary: Summary, alone: Summary | None = None) -> list[TableColumn]:
    """Return the columns of the ranked table; if `alone` is a run of one worker, two columns compare with it."""
    metric, goal = summary.metric, goal_of(summary)
    reached = f"seconds to {goal}: until the first evaluation that reached the target; > if no evaluation reached it."
    found = [
        TableColumn("#", cell=lambda row: row.place if row.run.useful else formatting.NONE),
        TableColumn("strategy", text=True, cell=lambda row: row.label),
        TableColumn(f"seconds to {goal or 'the end'}", note=reached * bool(goal), cell=lambda row: _time(row.run)),
    ]
    if goal and alone is not None:
        single = alone
        found += [
            TableColumn(
                "speed-up over one worker",
                rank=1,
                note="speed-up over one worker: seconds to the target of one worker alone ÷ those of the strategy.",
                cell=lambda row: _speedup(row.run, single),
            ),
            TableColumn(
                "worker-seconds",
                rank=7,
                note="worker-seconds: seconds to the target × workers, which is what a cluster is paid for.",
                cell=lambda row: _time(row.run, row.run.workers),
            ),
        ]
    if metric is not None:
        found.append(TableColumn(f"final {metric}", cell=lambda row: formatting.metric(row.run.final_metric)))
    return [
        *found,
        TableColumn("MB per worker sent / received", rank=2, cell=_megabytes),
        TableColumn(
            "staleness mean / max",
            rank=4,
            note="staleness: number of updates applied between reading the parameters and applying the gradient.",
            cell=lambda row: formatting.staleness(row.run),
        ),
        TableColumn(
            "computing",
            rank=3,
            note="computing: share of a worker's time; the rest is communicating and waiting.",
            cell=lambda row: formatting.share(row.run.utilization),
        ),
        TableColumn(
            "divergence",
            rank=5,
            note="divergence: root mean square distance of the replicas from their mean at the last evaluation.",
            cell=lambda row: formatting.number(row.run.divergence),
        ),
        TableColumn(
            "updates applied",
            rank=6,
            note="updates applied: share of the workers' updates that entered the models of the other workers, or of "
            "the servers. A finished run can stay below 100 % if workers exchange with few workers at a time, or drop "
            "updates.",
            cell=lambda row: formatting.share(row.run.completeness),
        ),
        TableColumn("status", text=True, rank=1, cell=lambda row: row.run.status),
    ]


def _megabytes(row: _Ranked) -> str:
    counts = row.run.sent_bytes_per_worker, row.run.received_bytes_per_worker
    return "/".join(formatting.number(count / 1e6) for count in counts)


def _time(summary: Summary, workers: int = 1) -> str:
    """Seconds to the target × workers; for a run that missed the target, the run's total time is a lower bound."""
    if summary.seconds_to_target is not None:
        return formatting.number(workers * summary.seconds_to_target)
    text = formatting.number(workers * summary.seconds)
    return text if goal_of(summary) is None else f"> {text}"


def _speedup(summary: Summary, alone: Summary) -> str:
    """Speed-up over one worker; a bound if one of the two runs ended before the target, a dash if both did."""
    own, single = summary.seconds_to_target, alone.seconds_to_target
    if own is not None:
        return formatting.number(single / own) if single is not None else f"> {formatting.number(alone.seconds / own)}"
    return formatting.NONE if single is None else f"< {formatting.number(single / summary.seconds)}"


def gradient_notes(configs: Iterable[RunConfig]) -> list[str]:
    """Sentences about simulations that computed gradients one by one, and about what partitions change."""
    configs = list(configs)
    said = {config.versions.get("gradients", "batched") for config in configs} - {"batched"}
    return [
        f"gradients were computed {how}; seconds are virtual, but the simulation itself takes longer"
        for how in sorted(said)
    ] + sorted({note for config in configs for note in partition_notes(config)})


def table(summaries: Sequence[Summary], seeds: int = 1) -> TextTable:
    """Return the table of ranked runs; without runs, the table is empty."""
    ranked = rank(summaries)
    if not ranked:
        return TextTable((), (), "no runs")
    return TextTable.of(
        columns(ranked[0], reference(ranked)),
        map(_Ranked, places(ranked), labels(ranked), ranked),
        title=heading(ranked),
        styles={0: "bold"} if ranked[0].useful and unranked(ranked) is None else {},
        marks=_STYLES,
        notes=[*over_one_worker(ranked, seeds), *apart(ranked), *ties(ranked, seeds)],
    )


def compared_workers(runs: Sequence[Summary] | Sequence[RunConfig]) -> list[int]:
    """Return the numbers of workers of the runs, without the one worker with which runs of several are compared."""
    found = sorted({run.workers for run in runs})
    return found[1:] if len(found) > 1 and found[0] == 1 else found


def heading(summaries: Sequence[Summary]) -> str:
    """Return the title of the table: job, number of workers, and the clock that measured the seconds."""
    first, clock = summaries[0], "real seconds"
    if first.clock == "virtual":
        clusters, laws = ({getattr(run, name) for run in summaries} for name in ("cluster", "compute"))
        model = "time is modeled"
        if len(clusters) == 1 and None not in clusters:
            model = f"on the cluster {first.cluster}"
        elif clusters == {None} and len(laws) == 1 and None not in laws:
            model = f"a gradient takes {first.compute}"
        clock = f"VIRTUAL seconds: {model}"
    counts = " and ".join(map(str, compared_workers(summaries)))
    return f"{first.job} on {counts} worker{'' if counts == '1' else 's'}, {clock}"
