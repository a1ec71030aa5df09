"""What the commands print about runs: the outcome of one run, and the ranked table of a comparison."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from click.exceptions import Exit

from flockstep.cli import show
from flockstep.experiments.single import carry_on, carry_out
from flockstep.launchers.output import Output
from flockstep.records.config import RunConfig
from flockstep.records.folder import RunFolder
from flockstep.records.summary import Summary, trained_apart
from flockstep.report import formatting
from flockstep.report.medians import spreads
from flockstep.report.ranking import names
from flockstep.report.table import gradient_notes, table
from flockstep.runtime.node_metrics import fingerprint

if TYPE_CHECKING:
    from flockstep.experiments.comparison import Comparison
    from flockstep.launchers.continuing import Continuation
    from flockstep.launchers.gathering import Gathering


def run(config: RunConfig, folder: Path, title: str, overwrite: bool, gathering: Gathering | None = None) -> Summary:
    """Train or simulate with a configuration, and show the progress under `title`; return the summary."""
    if config.kind == "simulate":
        with show.bar(title) as progress:
            return carry_out(config, folder, overwrite, watch=progress).summary
    with show.standings(title) as standings:

        def say(stream: int, data: bytes) -> None:
            show.note(data.decode(errors="replace").removesuffix("\n"))

        output = Output("none", show=say)  # of a script
        return carry_out(config, folder, overwrite, standings=standings, gathering=gathering, output=output).summary


def run_one(
    config: RunConfig,
    folder: Path,
    overwrite: bool,
    as_json: bool,
    gathering: Gathering | None = None,
    begun: Continuation | None = None,
    output: Output | None = None,
) -> None:
    """Carry out a run, or continue the one that has `begun` in its folder, and print the outcome. A script's `output`
    is shown beside the state of its run.
    """
    if begun is not None:
        if begun.resumes:
            resume_one(folder, as_json, None, gathering)
            return
        overwrite |= begun.overwrites
    with names_record(folder):
        if output is None:
            summary = run(config, folder, f"{config.job}, {config.title}", overwrite, gathering)
        else:
            with show.beside_scripts() as (standings, sink):
                shown = replace(output, show=sink)
                found = carry_out(config, folder, overwrite, standings=standings, gathering=gathering, output=shown)
            summary = found.summary
    conclude(summary, folder, as_json, must_reach=config.target is not None)


def resume_one(
    folder: Path,
    as_json: bool,
    workers: int | None,
    gathering: Gathering | None,
    replica_size: int | None = None,
) -> None:
    """Continue a run from its newest checkpoint, and print the outcome."""
    config = RunFolder(folder).read_config()
    if gathering is not None and workers is None:
        workers = gathering.over(config).workers  # hosts that --hosts names have numbers of workers
    if config.kind == "launch":
        with names_record(folder), show.beside_scripts() as (standings, sink):
            summary = carry_on(folder, workers, standings, gathering, sink, replica_size)
    else:
        with names_record(folder), show.standings(f"resuming {folder}") as standings_of_job:
            summary = carry_on(folder, workers, standings_of_job, gathering, replica_size=replica_size)
    conclude(summary, folder, as_json)


@contextlib.contextmanager
def names_record(folder: Path) -> Iterator[None]:
    """If the run fails, or is interrupted, after it has begun, name the folder of the record on standard error."""
    before = RunFolder(folder).begun
    try:
        yield
    except (Exception, KeyboardInterrupt):
        if RunFolder(folder).begun not in (None, before):
            show.note(f"record: {folder}")
        raise


def conclude(summary: Summary, folder: Path, as_json: bool, must_reach: bool = False) -> None:
    """Print the outcome of a run.

    The output of a launched script fills standard output, so there is no table of it. The command exits with code 1 if
    the run of a job diverged, failed, or missed a target that it must reach.
    """
    config, late, apart = RunFolder(folder).read_config(), missed(summary), trained_apart(summary)
    if as_json:
        show.json(as_data(summary, folder))
    elif config.kind == "launch":
        show.note(f"record: {folder}")
    else:
        show.page().print(table([summary]))
        print(f"record: {folder}")
    if config.kind == "launch":
        said = [] if apart is None else [apart]
    else:
        said = [*summary.refusals, *([] if late is None else [late])]
        if summary.status == "diverged":
            said.append(f"{summary.system or summary.strategy} diverged: {summary.error}")
        said += gradient_notes([config])
    for text in said:
        show.note(f"flockstep: {text}")
    if config.kind != "launch" and (not summary.useful or (must_reach and late is not None)):
        raise Exit(1)


def conclude_comparison(found: Comparison, as_json: bool) -> None:
    """Print the ranked table of a comparison."""
    first = [group.runs[0] for group in found.chosen]
    late = [] if found.repeated else filter(None, map(missed, first, names(first)))
    ways = gradient_notes([run.config for run in found.drawn])
    for sentence in [*late, *ways, *found.failures, *found.caveats]:
        show.note(f"flockstep: {sentence}")
    medians = [group.document(group in found.chosen) for group in found.groups] if found.repeated else []
    rows = [as_data(run.summary, run.folder) for run in found.runs]
    tables = [table(found.summaries, found.seeds)] + ([spreads(found.groups, found.chosen)] if found.repeated else [])
    show.result(as_json, {"report": str(found.report), "runs": rows, "medians": medians}, *tables)
    if not as_json:
        print(f"report: {found.report}")


def missed(summary: Summary, name: str | None = None) -> str | None:
    """Return a sentence about a target that a run did not reach; `name` is the run's, or its strategy's."""
    reached = summary.target is None or summary.seconds_to_target is not None
    if reached or summary.status == "failed" or summary.best_metric is None:
        return None
    return (
        f"{name or summary.system or summary.strategy} did not reach the target {summary.target:g}: its best "
        f"{summary.metric} was {formatting.metric(summary.best_metric)}; train longer (--epochs, --steps), lower --lr "
        "if training diverged, or change --target"
    )


def as_data(summary: Summary, folder: Path) -> dict[str, Any]:
    """Return a summary for --json, with the folder, the hash of the result, and how gradients were computed."""
    record = RunFolder(folder)
    return {
        "folder": str(folder),
        **msgspec.to_builtins(summary, str_keys=True),
        "result_hash": fingerprint(record.read_result()[0]) if record.result_file.exists() else None,
        "gradients": record.read_config().versions.get("gradients"),
    }
