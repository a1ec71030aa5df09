"""`flockstep plan`: predicts every strategy on a cluster, recommends one, or checks a prediction against a run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.markup import escape

from flockstep.cli import options as o
from flockstep.cli import show
from flockstep.errors import ConfigurationError, Interrupted
from flockstep.experiments.options import PlanOptions
from flockstep.options import Opt

if TYPE_CHECKING:
    from flockstep.experiments.planned import PlanResult

_output = partial(Opt, panel="Output")


def plan(
    options: PlanOptions,
    record: Annotated[
        tuple[Path, ...] | None,
        Opt(
            "Record of a run of this job to compare with the prediction; repeat the option for several.",
            names=("--check",),
        ),
    ] = None,
    everything: Annotated[
        bool,
        _output(
            "Show every strategy, every column and all reasons (default: only the most important ones).",
            names=("--all",),
        ),
    ] = False,
    out: Annotated[Path | None, _output("Also write the plan to this HTML file.")] = None,
    as_json: o.Json = False,
) -> None:
    """Predict every strategy on a cluster without running it, and recommend one."""
    if out is not None and out.suffix != ".html":
        raise ConfigurationError(f"--out must be an .html file, got {str(out)!r}; end the name in .html")
    if record:
        _check(options, record, as_json)
        return
    if options.cluster is None:
        _tell_of_calibration()
    from flockstep.experiments.planned import planned

    with show.status() as say:
        result = planned(options, say)
    if as_json:
        show.json(result.document())
    else:
        print_plan(result, everything or bool(options.strategies))
    if out is not None:
        result.write(out)
        if not as_json:
            print(out)
    if result.interrupted is not None:
        raise Interrupted(result.interrupted)


def print_plan(result: PlanResult, everything: bool) -> None:
    """Print a plan: the recommendation, the tables and the lists; only what matters most unless `everything` is set."""
    from flockstep.report.formatting import lines

    page, lists = show.page(), result.lists(everything)
    page.print(escape(f"{result.title}:"), highlight=False)
    for sentence in result.recommendation.sentences:
        page.print(escape(sentence), style="bold", highlight=False)
    page.print()
    if result.hybrid is not None and result.hybrid.command is not None:
        page.print(escape(f"  {result.hybrid.command}\n"), highlight=False, soft_wrap=True)
    for table in result.tables(everything):
        page.print(table)
    for heading, sentences in lists:
        page.print(f"\n{heading}:", highlight=False)
        for sentence in sentences:
            page.print(escape("  - " + "\n    ".join(lines(sentence, page.width - 4))), highlight=False)


def _tell_of_calibration() -> None:
    """Name the calibration that a plan without a cluster uses, on standard error."""
    from flockstep.costs.cluster_file import HERE, calibration, usual_cluster

    if usual_cluster() == HERE:
        show.note(
            f"cluster: {HERE}, as calibrated in {calibration()}; to plan for another cluster, add for example "
            "--cluster laptop"
        )


def _check(options: PlanOptions, records: tuple[Path, ...], as_json: bool) -> None:
    """Compare runs with their predictions."""
    from flockstep.costs.cluster_file import load_cluster
    from flockstep.planning.check import check, check_table
    from flockstep.planning.record_imports import same_job
    from flockstep.records.folder import RunFolder

    what = str(options.what)
    if options.simulate or options.hybrid or options.partitions or options.memory is not None:
        raise ConfigurationError(
            "--check compares a run with its prediction: it runs no trial and considers no other partition; leave out "
            f"--simulate, --hybrid, --partition and --memory, and write flockstep plan {what} --check …"
        )
    shape = None if options.cluster is None else load_cluster(options.cluster)
    for folder in records:
        config = RunFolder(folder).read_config()
        if not same_job(config, what):
            content = " of other content" if Path(config.job).name == Path(what).name else ""
            raise ConfigurationError(
                f"{folder} must hold a run of {what}, got a run of {config.job}{content}; write flockstep plan "
                f"{config.job} --check …"
            )
    found = [check(folder, shape, (what, *options.imports)) for folder in records]
    notes = dict.fromkeys(note for one in found for note in one.notes)
    show.result(as_json, [one.document() for one in found], check_table(found), *notes)
