"""`flockstep compare` and `flockstep report`: runs strategies with progress, prints the ranked table, and writes the
HTML report.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flockstep.cli import runs, show
from flockstep.experiments.comparison import Comparison, Grid, carry_out_all, runs_in
from flockstep.records.config import MetricTarget, RunConfig
from flockstep.records.summary import Summary
from flockstep.report import formatting
from flockstep.report.medians import spreads
from flockstep.report.ranking import names
from flockstep.report.table import gradient_notes, table

if TYPE_CHECKING:
    from flockstep.launchers.gathering import Gathering


def compare_all(grid: Grid, out: Path, as_json: bool, gathering: Gathering | None = None) -> int:
    """Run a comparison and show its progress; return the exit code: 1 if a strategy failed or diverged in all its runs.

    `gathering` gives the hosts of each real run; None: all processes are on this machine.
    """
    began, finished, ran = time.monotonic(), 0, 0

    def say(line: str) -> None:
        nonlocal finished
        finished += 1
        show.note(line)

    def execute(config: RunConfig, folder: Path, title: str, overwrite: bool) -> Summary:
        nonlocal ran
        rest = grid.count - finished - 1
        if ran and rest:
            title += f", {rest} more in about {formatting.seconds((time.monotonic() - began) / ran * rest)}"
        ran += 1
        # one worker alone needs no other host
        hosts = gathering if config.workers == grid.base.workers else None
        return runs.run(config, folder, title, overwrite, hosts)

    found = carry_out_all(grid, out, execute, say, lambda found: _print(found, as_json))
    return 1 if found.failures else 0


def _print(found: Comparison, as_json: bool) -> None:
    first = [group.runs[0] for group in found.chosen]
    missed = [] if found.repeated else filter(None, map(runs.missed, first, names(first)))
    ways = gradient_notes([run.config for run in found.drawn])
    for sentence in [*missed, *ways, *found.failures, *found.caveats]:
        show.note(f"flockstep: {sentence}")
    if as_json:
        medians = [group.document(group in found.chosen) for group in found.groups] if found.repeated else []
        rows = [runs.as_data(run.summary, run.folder) for run in found.runs]
        show.json({"report": str(found.report), "runs": rows, "medians": medians})
        return
    show.page().print(table(found.summaries, found.seeds))
    if found.repeated:
        show.page().print(spreads(found.groups, found.chosen))
    print(f"report: {found.report}")


def report(
    folders: Sequence[Path], out: Path, cluster: str | None, imports: Sequence[str], target: MetricTarget | None
) -> Path:
    """Write an HTML report of recorded runs, with predictions for `cluster` if a cluster is given; return its path.

    `target` replaces the targets of the runs.
    """
    from flockstep.costs.cluster_reading import load_cluster
    from flockstep.planning.check import for_report
    from flockstep.records.folder import RunFolder
    from flockstep.report.html import write_report

    found = [folder for given in folders for folder in runs_in(given)]
    predictions = for_report(found, None if cluster is None else load_cluster(cluster), imports)
    return write_report([RunFolder(folder).read() for folder in found], out, predictions=predictions, target=target)
