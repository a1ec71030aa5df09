"""Comparisons: a grid of runs (strategies, learning rates, seeds), stored as they finish, ranked at the end."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flockstep import registry
from flockstep.errors import CompositionError, ConfigurationError, Interrupted, RunError, require
from flockstep.experiments.folders import folder, slug
from flockstep.experiments.options import CompareOptions, configured, listed, rates, refuse_idle, takes
from flockstep.experiments.single import RunResult, carry_out, cluster_of, on_cluster
from flockstep.frameworks.job import defines_job
from flockstep.planning.check import for_report
from flockstep.records.access import set_readers
from flockstep.records.config import Kind, RunConfig, same_run
from flockstep.records.folder import RunFolder, no_run
from flockstep.records.owner import owned
from flockstep.records.summary import Summary
from flockstep.report import formatting
from flockstep.report.html import write_report
from flockstep.report.medians import RepeatedRuns, best, caveats
from flockstep.report.ranking import ONE_WORKER, measured_alike, names, rank
from flockstep.report.table import table
from flockstep.runtime.setup import canonical, check, digest, partition_of, prepare, require_unchanged

if TYPE_CHECKING:
    from flockstep.costs.cluster import ClusterShape

ALONE = "all_reduce"
"""Strategy of one worker alone, which has nobody to exchange with: the job's optimizer, and nothing is sent."""


class PlannedRun(NamedTuple):
    """A run of a comparison, and the folder of its record."""

    config: RunConfig
    folder: Path
    title: str
    """Name of the strategy, with the learning rate and the seed where they differ from those of its other runs."""


Execute = Callable[[PlannedRun, str, int, bool], Summary]
"""Function that carries out a run, given its title, how many follow, and whether to replace the recorded run."""


@dataclass(frozen=True)
class Grid:
    """The runs of a comparison: each strategy at each learning rate (or the job's), with `seeds` seeds."""

    base: RunConfig
    strategies: Sequence[str]
    rates: Sequence[float] = ()
    seeds: int = 1
    cluster: ClusterShape | None = None
    """The cluster whose links and times simulations use; None if `base` has a network and a compute model."""
    reference: bool = True
    """Whether one worker alone is trained beside the strategies, if these have several workers."""

    def __post_init__(self) -> None:
        if not self.strategies:
            raise ConfigurationError(
                "a comparison needs at least one strategy, got none; give for example 'all_reduce' and 'gossip'"
            )
        require(self.seeds >= 1, "seeds", ">= 1", self.seeds, "5 are usual")

    @property
    def repeated(self) -> bool:
        """Whether a strategy has more than one run, which means several seeds or learning rates."""
        return self.seeds > 1 or len(self.rates) > 1

    @property
    def alone(self) -> RunConfig | None:
        """The job on one undisturbed worker, with as many samples as a strategy uses; None if it is not run."""
        if not self.reference or self.base.workers == 1:
            return None
        replicas = partition_of(self.base).replicas(self.base.workers)
        steps, every = self.base.steps, self.base.evaluate_every
        return dataclasses.replace(
            self.base,
            workers=1,
            steps=None if steps is None else steps * replicas,
            evaluate_every=None if every is None else every * replicas,
            transport=None if self.base.transport is None else "shared_memory",
            partition=None,
            split="iid",
            result=None,
            faults=(),
        )

    def groups(self, out: Path) -> list[list[PlannedRun]]:
        """Return the runs by strategy and learning rate. Runs that differ only in their seed form one group."""
        configs = [self._with(self.base, text) for text in self.strategies]
        for config in configs:
            check(config)
        named = list(map(canonical, configs))
        # A system may stand beside the strategy that it is composed of, but not an alias beside its expression.
        same = [one.strategy if one.system in registry.aliases("strategy") else one.title for one in named]
        for text in same:
            if same.count(text) > 1:
                raise ConfigurationError(
                    f"the strategy {text} is given {same.count(text)} times; give every strategy once"
                )
        slugs = [slug(config.title) for config in named]
        marks = [hashlib.sha256(config.title.encode()).hexdigest()[:8] for config in named]
        # names that are equal after shortening get a suffix
        places = [f"{s}-{mark}" if slugs.count(s) > 1 else s for s, mark in zip(slugs, marks, strict=True)]
        titles = [config.title for config in configs]
        if self.alone is not None:
            configs.append(self._with(self.alone, ALONE))
            places.append(slug(ONE_WORKER))
            titles.append(ONE_WORKER)
        groups = []
        for config, place, title in zip(configs, places, titles, strict=True):
            for lr in self.rates or (self.base.lr,):
                folder, name = (f"{place}-lr-{lr:g}", f"{title}, lr {lr:g}") if self.rates else (place, title)
                groups.append(
                    [
                        PlannedRun(
                            dataclasses.replace(config, lr=lr, seed=seed),
                            out / (folder if self.seeds == 1 else f"{folder}-seed-{seed}"),
                            name if self.seeds == 1 else f"{name}, seed {seed}",
                        )
                        for seed in range(config.seed, config.seed + self.seeds)
                    ]
                )
        return groups

    def _with(self, base: RunConfig, strategy: str) -> RunConfig:
        """The configuration with a strategy; the output of scripts is hidden."""
        if base.kind == "launch":
            from flockstep.launchers.script import with_strategy

            return with_strategy(dataclasses.replace(base, output="none"), strategy)
        return on_cluster(dataclasses.replace(base, strategy=strategy), self.cluster)


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison: the ranked runs of several strategies. `print` shows the ranked table."""

    runs: tuple[RunResult, ...]
    """All runs, in the given order of strategies, learning rates and seeds."""
    groups: tuple[RepeatedRuns, ...]
    """The summaries of the runs. Runs that differ only in their seed form one group."""
    chosen: tuple[RepeatedRuns, ...]
    """For each strategy, the summaries of the runs at the learning rate by which the strategy is ranked."""
    report: Path
    """Path of the HTML page with the ranked table and the figures."""
    repeated: bool
    """Whether a strategy has more than one run, so that strategies are ranked by medians."""

    @property
    def summaries(self) -> list[Summary]:
        """One summary for each strategy, best first: that of its run, or the medians of its runs."""
        return rank([group.median() if self.repeated else group.runs[0] for group in self.chosen])

    @property
    def seeds(self) -> int:
        """Largest number of runs that any strategy has at one learning rate."""
        return max(len(group.runs) for group in self.groups)

    @property
    def drawn(self) -> list[RunResult]:
        """For each strategy, the run whose curves the report draws: the run nearest to the medians."""
        nearest = [group.nearest() for group in self.chosen]
        return [next(run for run in self.runs if run.summary is one) for one in nearest]

    @property
    def failures(self) -> list[str]:
        """One sentence for each strategy that diverged or failed, with the reason."""
        named = zip(names(self.summaries), self.summaries, strict=True)
        return [f"{name}: {one.error}" for name, one in named if one.status in ("diverged", "failed")]

    @property
    def caveats(self) -> list[str]:
        """Sentences about questions that a comparison of medians or of best learning rates leaves open."""
        return caveats(self.groups, self.chosen) if self.repeated else []

    def __str__(self) -> str:
        return "\n".join([str(table(self.summaries, self.seeds)), *self._sentences])

    def _repr_html_(self) -> str:
        """Return the ranked table for a cell of a notebook."""
        return table(self.summaries, self.seeds).to_html(self._sentences)

    @property
    def _sentences(self) -> list[str]:
        return [*self.failures, *self.caveats, f"report: {self.report}"]


@takes(CompareOptions)
def compare(options: CompareOptions) -> Comparison:
    """Run several strategies on one job or script and rank them, as `flockstep compare` does.

    A comparison that was interrupted continues when it is called again with the same `out`. A script must guard a
    comparison on real processes, as it guards `run`.

    Returns:
        The ranked runs, with the path of the report.

    Raises:
        ConfigurationError: an argument is invalid; nothing was started.
        Interrupted: the comparison was interrupted; finished runs are in the report.
    """

    def execute(run: PlannedRun, title: str, rest: int, overwrite: bool) -> Summary:
        return carry_out(run.config, run.folder, overwrite).summary

    place = folder(options.out, f"compare-{options.job}")
    return carry_out_all(grid_of(options), place, execute, lambda line: None, lambda found: None)


def grid_of(options: CompareOptions) -> Grid:
    """Return the runs of a comparison. A Python file that defines no `job` at its top level is a script to launch."""
    job = options.job
    script = Path(job).is_file() and Path(job).suffix == ".py" and not defines_job(job)
    if script and options.simulated:
        raise ConfigurationError(
            f"{job} is a training script, because it has no function job(), and scripts run on real processes only; "
            "leave out --simulate (in Python, simulated=True), or add a function job() that returns a flockstep.Job"
        )
    kind: Kind = "launch" if script else "simulate" if options.simulated else "train"
    refuse_idle(kind, options)
    base = configured(kind, options, strategy="")
    strategies = tuple(map(str, listed("strategies", options.strategies)))
    learning_rates = rates(options.lr_grid, options.lr)
    return Grid(base, strategies, learning_rates, options.seeds, cluster_of(options), options.reference)


def carry_out_all(
    grid: Grid, out: Path, execute: Execute, say: Callable[[str], None], conclude: Callable[[Comparison], None]
) -> Comparison:
    """Run the configurations of `grid` that have no finished run in `out`, and rank all runs.

    `say` is called with a line for each run, `conclude` with the comparison, even if it was interrupted.
    """
    if grid.base.kind != "simulate":
        from flockstep.launchers.children import refuse_program

        refuse_program()  # before the folder is made
    groups = grid.groups(out)
    planned = [run for group in groups for run in group]
    with owned(out):
        if grid.base.shared:
            set_readers(out, shared=True)
        try:
            for number, run in enumerate(planned, start=1):
                title = f"{number} of {len(planned)}: {run.config.job}, {run.title}"
                if _is_finished(run.config, run.folder):
                    say(f"{title}: kept from before")
                    continue
                again = RunFolder(run.folder).unfinished
                try:
                    say(f"{title}: {_in_short(execute(run, title, len(planned) - number, again))}")
                except Interrupted:
                    raise
                except (RunError, ConfigurationError, CompositionError) as error:
                    # a script may refuse one strategy only; what a job refuses, it refuses for all, and so does what
                    # never started
                    refused = not isinstance(error, RunError) and run.config.kind != "launch"
                    if refused or not RunFolder(run.folder).config_file.exists():
                        raise
                    say(f"{title}: {RunFolder(run.folder).read_summary().status}: {error}")
        except (Interrupted, KeyboardInterrupt):
            if any(RunFolder(run.folder).config_file.exists() for run in planned):
                conclude(_ranked(groups, grid, out))
            raise Interrupted(
                f"interrupted; finished runs are kept: repeat the command with --out {out} to continue"
            ) from None
        found = _ranked(groups, grid, out)
        conclude(found)
        return found


def _is_finished(config: RunConfig, folder: Path) -> bool:
    """Whether `folder` holds this run, finished; a finished run of another configuration is refused."""
    record = RunFolder(folder)
    if not record.config_file.exists() or record.unfinished:
        return False
    if config.kind == "launch":
        require_unchanged(record.read_config(), digest(Path(config.job)))
    if not same_run(record.read_config(), config if config.kind == "launch" else prepare(config)[2]):
        raise ConfigurationError(
            f"{folder} holds a finished run of another configuration; choose another folder with --out, or "
            "delete this folder"
        )
    return True


def _in_short(summary: Summary) -> str:
    metric = "" if summary.metric is None else f"{summary.metric} {formatting.metric(summary.final_metric)}"
    reached = "" if summary.seconds_to_target is None else f", target after {summary.seconds_to_target:.2f} s"
    return f"{metric}{reached} ({summary.clock} {summary.seconds:.2f} s)".strip()


def _ranked(groups: Sequence[Sequence[PlannedRun]], grid: Grid, out: Path) -> Comparison:
    """Rank the runs that have a record so far, and write the report."""
    there = [[run.folder for run in group if RunFolder(run.folder).config_file.exists()] for group in groups]
    folders = [folder for group in there for folder in group]
    read = dict(zip(folders, measured_alike([RunFolder(folder).read() for folder in folders]), strict=True))
    made = [RepeatedRuns(tuple(read[folder].summary for folder in group)) for group in there if group]
    contenders = dict.fromkeys(group.contender for group in made)
    found = Comparison(
        tuple(RunResult(folder, record.config, record.summary) for folder, record in read.items()),
        tuple(made),
        tuple(best([one for one in made if one.contender == name]) for name in contenders),
        out / "report.html",
        grid.repeated,
    )
    folders = [run.folder for run in found.drawn]
    summaries = [group.median() if grid.repeated else group.runs[0] for group in found.chosen]
    records = [dataclasses.replace(read[f], summary=one) for f, one in zip(folders, summaries, strict=True)]
    spread = (found.groups, found.chosen) if grid.repeated else None
    write_report(records, found.report, predictions=for_report(folders), spread=spread)
    return found


def runs_in(folder: Path) -> list[Path]:
    """Return the folders of the runs in `folder`; if `folder` is itself the folder of a run, return only `folder`."""
    if RunFolder(folder).config_file.exists():
        return [folder]
    found = sorted(path.parent for path in folder.glob("*/config.toml"))
    if not found:
        raise no_run(folder, "the folder of a run or of a comparison")
    return found
