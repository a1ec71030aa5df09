"""The commands before a run: `flockstep layers`, `layouts`, `plan` and `calibrate`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
from rich.markup import escape

from flockstep import registry
from flockstep.cli import options as o
from flockstep.cli import show
from flockstep.errors import ConfigurationError, Interrupted, UnknownName
from flockstep.experiments.options import PlanOptions
from flockstep.options import Arg, MeasureOptions, Opt, options_of

if TYPE_CHECKING:
    from flockstep.costs.layers import ModelShape
    from flockstep.experiments.planned import PlanResult

PUBLISHED = ("vgg-a", "resnet-152", "googlenet")
"""Names of the models in the published figure of layouts."""
_output = partial(Opt, panel="Output")


def shape_named(what: str) -> ModelShape:
    """Return the layers of the workload, reference model or Python file that is named on the command line."""
    from flockstep.costs.reference import MODELS, reference
    from flockstep.frameworks.layers import file_shape, job_shape
    from flockstep.workloads.base import Workload

    if what.endswith(".py"):
        return file_shape(what)
    if what in MODELS:
        return reference(what)
    known = registry.names("workload")
    if "(" not in what and what not in known and what not in registry.aliases("workload"):
        raise UnknownName.among("workload or reference model", what, [*known, *MODELS])
    return job_shape(Workload.parse(what).job(0))


def layers(
    what: Annotated[str, Arg("A job, a Python file with model() and inputs(), or a reference model such as vgg-a.")],
    batch: Annotated[int, Opt("Number of samples per worker and step.", names=("--batch", "-b"))] = 32,
    workers: Annotated[
        int, Opt("Number of workers over which the data, or one layer, is split.", names=("--workers", "-n"))
    ] = 16,
    everything: Annotated[
        bool, Opt("Show every layer (default: a long table omits layers without parameters).", names=("--all",))
    ] = False,
    as_json: o.Json = False,
) -> None:
    """Show a model's layers: parameters, work, depth, and the bytes sent under data parallelism and if the layer is
    split.
    """
    from flockstep.report import layers as report

    model = shape_named(what)
    table = report.table(model, batch, workers, everything)
    show.result(as_json, report.document(model, batch, workers), table, *report.sentences(model, batch, workers))


def layouts(
    what: Annotated[
        tuple[str, ...], Arg("Jobs, Python files or reference models (default: vgg-a, resnet-152 and googlenet).")
    ] = (),
    workers: Annotated[int, Opt("Workers.", names=("--workers", "-n"))] = 16,
    bandwidth: Annotated[str, Opt("Bandwidth of every worker's link, such as 1gbit.")] = "10gbit",
    as_json: o.Json = False,
) -> None:
    """Show the smallest delay of a step for eight layouts of the parameters, such as naive server, tree and ring."""
    from flockstep.report.layers import Delays
    from flockstep.simulation import units

    rate = units.bandwidth(units.with_unit(bandwidth, "--bandwidth", "1gbit"), "--bandwidth")
    delays = Delays(tuple(shape_named(name) for name in what or PUBLISHED), workers, rate)
    show.result(as_json, delays.document(), delays.table(), *delays.sentences())


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
    from flockstep.costs.cluster_file import HERE, calibration, usual_cluster
    from flockstep.experiments.planned import planned

    if options.cluster is None and usual_cluster() == HERE:
        show.note(
            f"cluster: {HERE}, as calibrated in {calibration()}; to plan for another cluster, add for example "
            "--cluster laptop"
        )
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


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Options of a model that is fitted to a run's record."""

    records: tuple[Path, ...] | None = Opt(
        "Fit the cluster to the record of a run instead of measuring this machine; repeat the option for "
        "several runs of one job.",
        names=("--from",),
    ).default()
    latency: str | None = Opt("Latency of the links, if known, such as 100us; only with --from.").default()
    bandwidth: str | None = Opt("Bandwidth of the links, if known, such as 1gbit; only with --from.").default()
    imports: o.Imports = ()


def calibrate(
    context: click.Context,
    measuring: MeasureOptions,
    fitting: FitOptions,
    out: Annotated[Path | None, Opt("File to write the cluster to (default: standard output).")] = None,
    keep: Annotated[
        bool,
        Opt("Save the measured cluster as the default cluster of flockstep plan.", names=("--keep/--no-keep",)),
    ] = True,
    as_json: o.Json = False,
) -> None:
    """Measure this machine, or fit a model to a run's record, and write a cluster file for `flockstep plan`."""
    from flockstep.costs.cluster_file import calibration

    if out is not None and out.suffix != ".toml":
        raise ConfigurationError(f"--out must be a .toml file, got {str(out)!r}; end the name in .toml")
    if fitting.records:
        o.refuse(
            context,
            options_of(MeasureOptions),
            "is only for measuring this machine and has no effect with --from; leave it out",
        )
        from flockstep.planning.fit import fit_records
        from flockstep.simulation.units import bandwidth, duration, with_unit

        latency, rate = fitting.latency, fitting.bandwidth
        found = fit_records(
            list(fitting.records),
            None if latency is None else duration(with_unit(latency, "--latency", "100us"), "--latency"),
            None if rate is None else bandwidth(with_unit(rate, "--bandwidth", "1gbit"), "--bandwidth"),
            fitting.imports,
        )
    else:
        o.refuse(context, options_of(FitOptions), "is only for --from; leave it out, or add --from with a run")
        from flockstep.planning.calibrate import calibrate as measure

        with show.status() as say:
            found = measure(measuring, say)
    here = calibration() if keep and not fitting.records else None
    for file in filter(None, (here, out)):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(found.to_toml(), encoding="utf-8")
    if here is not None:
        show.note(f"saved as the cluster 'here', the default of flockstep plan: {here}")
    if as_json:
        show.json({"cluster": found.to_toml(), "notes": list(found.notes), "file": None if out is None else str(out)})
    elif out is None:
        print(found.to_toml(), end="")
    else:
        print(*found.notes, f"cluster: {out}", sep="\n")
