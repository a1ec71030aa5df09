"""`flockstep plan`: predicts every strategy on a cluster, recommends one, or checks a prediction against a run."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.markup import escape

from flockstep.cli import options as o
from flockstep.cli import show
from flockstep.errors import ConfigurationError, Interrupted
from flockstep.options import Arg, Opt

if TYPE_CHECKING:
    from flockstep.cli.search import Tried
    from flockstep.planning.advice import Advice
    from flockstep.planning.check import Check
    from flockstep.planning.hybrid import HybridAdvice, HybridOptions
    from flockstep.planning.plan import Outlook
    from flockstep.planning.step_prediction import StepPrediction
    from flockstep.report.page import Listing
    from flockstep.report.terminal import TextTable


split_option = functools.partial(Opt, panel="Split models")
"""An option that applies to models which are split over workers; they are a group in `--help`."""
output_option = functools.partial(Opt, panel="Output")
trial_option = functools.partial(Opt, panel="Trials")
"""An option about trials; they are a group in `--help`."""
FOREMOST, REASONS = 6, 4
"""FOREMOST: number of strategies in the table of a plan. REASONS: number of reasons for the advice. With --all,
everything is shown.
"""
MATTERS = 5
"""Largest rank of the columns that the table of a plan shows; with --all, all columns are shown."""


def plan(
    what: Annotated[
        str,
        Arg(
            help="Name of a workload or model (`flockstep list workload`, `flockstep list model`), or a Python file "
            "with job()."
        ),
    ],
    cluster: Annotated[
        str | None,
        Opt(
            names=("--cluster", "-c"),
            help="A name from `flockstep list clusters`, or a TOML file such as the one that `flockstep calibrate` "
            "writes.",
            shown="laptop, or here after flockstep calibrate; with --check the cluster of the run",
        ),
    ] = None,
    workers: Annotated[
        int | None, Opt(names=("--workers", "-n"), help="Number of workers (default: all workers of the cluster).")
    ] = None,
    require: Annotated[
        tuple[str, ...] | None,
        Opt(
            help="Requirement that the strategy must meet: unbalanced, reproducible, elastic, private or slow-links; "
            "repeat the option for several."
        ),
    ] = None,
    strategy: Annotated[
        tuple[str, ...] | None,
        Opt(
            names=("--strategy", "-s"),
            help="Strategy to consider; repeat the option for several (default: all strategies).",
            nouns=("strategy",),
        ),
    ] = None,
    batch: Annotated[
        int | None, Opt(names=("--batch", "-b"), help="Number of samples per gradient (default: the job's).")
    ] = None,
    hours: Annotated[
        float | None,
        Opt(
            help="Length of the run in hours; it determines how many failures are expected.",
            shown="the time of the job's epochs; 24 without data",
        ),
    ] = None,
    record: Annotated[
        tuple[Path, ...] | None,
        Opt(
            names=("--check",),
            help="Record of a run of this job to compare with the prediction; repeat the option for several.",
        ),
    ] = None,
    hybrid: Annotated[
        bool,
        split_option(
            names=("--hybrid",),
            help="Also predict models that are split over workers, and choose partition and strategy together.",
        ),
    ] = False,
    partition: Annotated[
        tuple[str, ...] | None,
        split_option(
            help="Partition to consider, such as pipeline(2, 1f1b, 8); repeat the option for several (default with "
            "--hybrid: the best partitions that a search finds)."
        ),
    ] = None,
    memory: Annotated[
        str | None,
        split_option(
            help="Memory of a worker, such as 16GB; activations are included. Implies --hybrid.",
            shown="memory stated by the cluster",
        ),
    ] = None,
    imports: o.Imports = (),
    everything: Annotated[
        bool,
        output_option(
            names=("--all",),
            help="Show every strategy, every column and all reasons (default: only the most important ones).",
        ),
    ] = False,
    budget: Annotated[
        float,
        trial_option(
            help="CPU seconds for trials, which train with the strategies in virtual time to measure how many samples "
            "each needs on this job; 0 for no trials, so that a formula assumes the number."
        ),
    ] = 120.0,
    top: Annotated[
        int | None,
        trial_option(help="Number of strategies to try in addition to one worker (default: all that could be best)."),
    ] = None,
    seed: Annotated[int, trial_option(help="First seed of trials.")] = 0,
    split: Annotated[
        str | None, trial_option(help="How data is split in trials (default: as --require demands).")
    ] = None,
    simulate: Annotated[
        bool,
        trial_option(
            names=("--simulate",),
            help="Trials go on to the job's target, not only to a loss that one worker reaches early.",
        ),
    ] = False,
    target: Annotated[
        float | None, trial_option(help="Metric that a trial must reach, with --simulate (default: the job's).")
    ] = None,
    keep: Annotated[
        Path | None,
        trial_option(
            help="Folder in which trials are saved, with --simulate; give the same folder again to continue (default: "
            "a new folder in runs/)."
        ),
    ] = None,
    out: Annotated[Path | None, output_option(help="Also write the plan to this HTML file.")] = None,
    as_json: o.Json = False,
) -> None:
    """Predict every strategy on a cluster without running it, and recommend one."""
    _refuse(what, simulate, bool(record), {"target": target, "keep": keep}, out)
    if imports:
        from flockstep.frameworks.job import import_components

        import_components(imports)
    from flockstep.planning.hybrid import HybridOptions

    named = tuple(strategy or ())
    splits = HybridOptions.of(hybrid, partition or (), memory, named, imports or ())
    if splits.wanted and record:
        raise ConfigurationError(
            "--check compares a run with its prediction and considers no other partition; leave out --hybrid, "
            "--partition and --memory"
        )
    if record:
        _check(what, cluster, list(record), imports, as_json)
        return
    from flockstep.planning.advice import require_known

    require_known(require or ())
    outlook = _outlook(what, cluster or _usual(), workers, batch, named, _seconds(hours), splits.memory)
    requirements = tuple(require or ())
    tried = None
    from flockstep.planning.search import can_be_tried

    if budget > 0 and (simulate or (can_be_tried(outlook) and not splits.wanted)):
        from flockstep.cli.search import TrialOptions
        from flockstep.cli.search import tried as measured

        folder = o.folder(keep, f"plan-{outlook.task.name}-{outlook.site.cluster.name}") if simulate else None
        by_label = "by-label" if "unbalanced" in requirements else "iid"
        asked = TrialOptions(budget, top, target, seed, split or by_label, folder)
        tried = measured(outlook, requirements, bool(strategy), asked)
    _conclude(outlook, requirements, tried, out, as_json, everything or bool(strategy), splits)


def _usual() -> str:
    """The cluster of a plan that names none; a calibration that is used is named on standard error."""
    from flockstep.costs.cluster_reading import HERE, calibration, usual_cluster

    name = usual_cluster()
    if name == HERE:
        said = (
            f"cluster: {HERE}, as calibrated in {calibration()}; to plan for another cluster, add for example "
            "--cluster laptop"
        )
        show.note(said)
    return name


def _refuse(what: str, simulate: bool, check: bool, asked: dict[str, Any], out: Path | None) -> None:
    """Refuse options that mean nothing for what is asked for."""
    for name, value in asked.items():
        if value is not None and not simulate:
            raise ConfigurationError(f"--{name} {value} has an effect on trials to a target only; add --simulate")
    if simulate and check:
        raise ConfigurationError(
            "--check compares with a finished run and cannot be combined with --simulate; write flockstep plan "
            f"{what} --check …"
        )
    if out is not None and out.suffix != ".html":
        raise ConfigurationError(f"--out must be an .html file, got {str(out)!r}; end the name in .html")


def _conclude(
    outlook: Outlook,
    requirements: tuple[str, ...],
    tried: Tried | None,
    out: Path | None,
    as_json: bool,
    everything: bool,
    splits: HybridOptions,
) -> None:
    """Advise and print, also where trials were interrupted.

    Raises:
        Interrupted: the user interrupted the trials.
    """
    from flockstep.planning.advice import advise
    from flockstep.planning.search import measured

    results = () if tried is None else (tried.found, tried.candidates)
    outlook = outlook if tried is None else measured(outlook, tried.found)
    interrupted = None if tried is None else tried.interrupted
    advice = advise(outlook, requirements, *results)
    split = _split(outlook, advice, splits) if splits.wanted and interrupted is None else None
    _print(outlook, advice, tried, as_json, everything, split)
    if out is not None:
        from flockstep.planning.page import write_plan

        listings = [] if tried is None else [_listing(tried)]
        if split is not None:
            from flockstep.cli.hybrid import listing

            listings.insert(0, listing(split))
            advice = split.together(advice)
            if split.command is not None:
                advice = replace(advice, sentences=(*advice.sentences, f"The command is: {split.command}"))
        write_plan(outlook, advice, out, listings)
        if not as_json:
            print(out)
    if interrupted is not None:
        raise Interrupted(interrupted)


def _split(outlook: Outlook, advice: Advice, asked: HybridOptions) -> HybridAdvice:
    from flockstep.cli.hybrid import advised

    try:
        return advised(outlook, advice, asked)
    except KeyboardInterrupt as stop:
        raise Interrupted(
            f"{str(stop) or 'interrupted'}; the plan of split models was not finished; leave out --hybrid, --partition "
            "and --memory for a plan of whole replicas"
        ) from None


def _listing(tried: Tried) -> Listing:
    from flockstep.cli.search import listing

    return listing(tried)


def _print(
    outlook: Outlook, advice: Advice, tried: Tried | None, as_json: bool, everything: bool, split: HybridAdvice | None
) -> None:
    if as_json:
        from flockstep.experiments.planned import PlanResult

        document = PlanResult(outlook, advice, split).document()
        if tried is not None:
            from flockstep.cli.search import document as of_trials

            document["trials"] = of_trials(tried)
        show.json(document)
        return
    from flockstep.planning.plan_text import many

    page = show.page()
    title = f"{outlook.task.name} on {many(outlook.workers, 'worker')} of {outlook.site.cluster.name}"
    page.print(escape(f"{title}:"), highlight=False)
    advice = advice if split is None else split.together(advice)
    for sentence in advice.sentences:
        page.print(escape(sentence), style="bold", highlight=False)
    page.print()
    if split is not None:
        _print_split(page, split, everything)
    page.print(_table(outlook, advice, everything, "" if split is None else "whole replicas"))
    if tried is not None and tried.found:
        from flockstep.cli.search import table

        page.print(table(tried, everything))
    _say(page, outlook, advice, tried, everything)


def _print_split(page: Console, split: HybridAdvice, everything: bool) -> None:
    """Print the command to copy, the table of split replicas, and what was refused."""
    from flockstep.cli.hybrid import refusals, table

    if split.command is not None:
        page.print(escape(f"  {split.command}\n"), highlight=False, soft_wrap=True)
    if split.splits:
        page.print(table(split, everything))
    for sentence in refusals(split) if everything or not split.splits else ():
        page.print(escape(sentence), highlight=False)


def _seconds(hours: float | None) -> float | None:
    """`hours` in seconds; None for None."""
    if hours is not None and not 0 < hours < float("inf"):
        raise ConfigurationError(
            f"--hours must be > 0 and finite, got {hours:g}; leave it out for the length of the job"
        )
    return None if hours is None else 3600 * hours


def _outlook(
    what: str,
    cluster: str,
    workers: int | None,
    batch: int | None,
    strategies: tuple[str, ...],
    length: float | None,
    memory: float | None,
) -> Outlook:
    from flockstep.experiments.planned import predicted

    begun: list[tuple[str, float]] = []
    with show.status() as say:

        def note(what: str, done: float = 0, total: float = 0) -> None:
            if total:
                begun.append((what, total))
            say(what, done, total)

        try:
            return predicted(what, cluster, workers, batch, strategies, length, note, memory)
        except KeyboardInterrupt as stop:
            raise Interrupted(f"{str(stop) or 'interrupted'}; {_finished(begun)}") from None


def _finished(begun: Sequence[tuple[str, float]]) -> str:
    """How far a plan came that the user interrupted, and how to get a plan sooner; `begun`: the name of each strategy
    and the number of all strategies.
    """
    names = [name for name, _ in begun[:-1]]
    if not names:
        return "no strategy was finished"
    return (
        f"{len(names)} of {begun[-1][1]:.0f} strategies were finished: {', '.join(names)}; a plan of fewer "
        "strategies takes less time: name strategies with -s, for example -s all_reduce -s local_sgd"
    )


def _table(outlook: Outlook, advice: Advice, everything: bool, title: str) -> TextTable:
    """The strategies by their predicted speed-up; unless `everything` is set, only the best that meet the
    requirements, and one worker.
    """
    from flockstep.planning.plan_text import COLUMNS, cells
    from flockstep.report.terminal import TextTable

    out = {name for name, _ in advice.excluded}
    ranked = advice.ranked(outlook)
    shown = ranked if everything else _foremost(ranked, out, advice.choice, outlook.alone)
    kept = [place for place, one in enumerate(COLUMNS) if everything or one.rank <= MATTERS]
    rows = [cells(outlook, found, advice.speedups[found.name]) for found in shown]
    styles = {n: "bold" if one is advice.choice else "dim" for n, one in enumerate(shown)}
    styles = {n: style for n, style in styles.items() if style == "bold" or shown[n].name in out}
    return TextTable(
        [COLUMNS[place] for place in kept],
        [[row[place] for place in kept] for row in rows],
        title,
        styles=styles,
        notes=() if everything else (_left_out(len(ranked) - len(shown), len(COLUMNS) - len(kept)),),
    )


def _foremost(ranked: Sequence[StepPrediction], out: set[str], *always: StepPrediction | None) -> list[StepPrediction]:
    """The strategies that a plan shows first: the best that meet the needs, and those in `always`."""
    best = [one for one in ranked if one.name not in out][:FOREMOST]
    return [one for one in ranked if any(one is other for other in (*best, *always))]


def _left_out(strategies: int, columns: int) -> str:
    from flockstep.planning.plan_text import many

    rest = f"{many(strategies, 'more strategy', 'more strategies')}, " if strategies else ""
    return (
        f"Left out: {rest}{many(columns, 'more column')}, further reasons, strategies that are ruled out, "
        "and effects that the figures do not include; --all shows everything."
    )


def _say(page: Console, outlook: Outlook, advice: Advice, tried: Tried | None, everything: bool) -> None:
    from flockstep.planning.plan_text import ruled_out, unplanned
    from flockstep.report.formatting import lines

    unknown, about = outlook.left_out, tuple[str, ...]()
    if tried is not None:
        from flockstep.planning.search import left_out

        unknown, about = (*unknown, *left_out()), tried.notes
    parts = [
        ("why", advice.reasons if everything else advice.reasons[:REASONS]),
        ("what would change this recommendation", advice.changes),
        ("trials", about),
    ]
    if everything:
        parts += [
            ("ruled out", ruled_out(advice.excluded)),
            ("what these figures do not include", (*unknown, *unplanned(outlook))),
        ]
    for heading, sentences in parts:
        if sentences:
            page.print(f"\n{heading}:", highlight=False)
        for sentence in sentences:
            page.print(escape("  - " + "\n    ".join(lines(sentence, page.width - 4))), highlight=False)


def _check(what: str, cluster: str | None, records: list[Path], imports: tuple[str, ...], as_json: bool) -> None:
    from flockstep.costs.cluster_reading import load_cluster
    from flockstep.planning.check import check
    from flockstep.planning.record_imports import same_job
    from flockstep.records.folder import RunFolder

    shape = None if cluster is None else load_cluster(cluster)
    for folder in records:
        config = RunFolder(folder).read_config()
        if not same_job(config, what):
            content = " of other content" if Path(config.job).name == Path(what).name else ""
            raise ConfigurationError(
                f"{folder} must hold a run of {what}, got a run of {config.job}{content}; write flockstep plan "
                f"{config.job} --check …"
            )
    found = [check(folder, shape, (what, *imports)) for folder in records]
    if as_json:
        show.json([one.document() for one in found])
    else:
        page = show.page()
        page.print(_checks(found))
        for note in dict.fromkeys(note for one in found for note in one.notes):
            page.print(escape(note), highlight=False)


def _checks(found: list[Check]) -> TextTable:
    from flockstep.planning.check import CHECK_COLUMNS, check_cells
    from flockstep.report.terminal import TextTable

    return TextTable(CHECK_COLUMNS, [check_cells(one) for one in found], "predicted and measured")
