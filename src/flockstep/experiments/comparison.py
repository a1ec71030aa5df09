"""A grid of runs (strategies, learning rates, seeds), kept as they finish, ranked at the end."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flockstep.drivers.setup import canonical, check, prepare
from flockstep.errors import ConfigurationError, Interrupted, RunError
from flockstep.experiments.folders import folder, slug
from flockstep.experiments.single import RunResult, carry_out
from flockstep.planning.check import for_report
from flockstep.records.config import RunConfig
from flockstep.records.folder import RunFolder
from flockstep.records.owner import owned
from flockstep.records.summary import Summary
from flockstep.report.html import write_report
from flockstep.report.medians import Group, best, caveats
from flockstep.report.ranking import rank
from flockstep.simulation import USUAL_COMPUTE, USUAL_NETWORK

if TYPE_CHECKING:
    from flockstep.strategies.base import Strategy

Execute = Callable[[RunConfig, Path, str, bool], Summary]
"""Carries out a configuration in a folder, under a title; the last argument: whether to replace what is there."""


@dataclass(frozen=True)
class Grid:
    """What to compare: each strategy at each learning rate (none: the job's own) with each of `seeds` seeds."""

    base: RunConfig
    strategies: Sequence[str]
    rates: Sequence[float] = ()
    seeds: int = 1

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ConfigurationError(f"seeds must be >= 1 run of each strategy, got {self.seeds}; 5 are usual")

    @property
    def repeated(self) -> bool:
        """Whether a strategy has more than one run."""
        return self.seeds > 1 or len(self.rates) > 1

    def groups(self, out: Path) -> list[list[_Planned]]:
        """The runs, those that differ in their seed only together, by strategy and learning rate.

        Raises:
            ConfigurationError: a strategy or an option that no run could work with, or a strategy given twice.
        """
        configs = [dataclasses.replace(self.base, strategy=text) for text in self.strategies]
        for config in configs:
            check(config)
        texts = [canonical(config).title for config in configs]
        for text in texts:
            if texts.count(text) > 1:
                raise ConfigurationError(f"the strategy {text} is given {texts.count(text)} times; give each once")
        found = []
        for config, name in zip(configs, _names(texts), strict=True):
            for lr in self.rates or (self.base.lr,):
                rated, place = dataclasses.replace(config, lr=lr), f"{name}-lr-{lr:g}" if self.rates else name
                found.append([self._planned(rated, out / place, index) for index in range(self.seeds)])
        return found

    def marks(self, config: RunConfig) -> str:
        """What tells a run from the others of its strategy."""
        rate = f", lr {config.lr:g}" if self.rates else ""
        return rate + (f", seed {config.seed}" if self.seeds > 1 else "")

    def _planned(self, config: RunConfig, folder: Path, index: int) -> _Planned:
        seed = config.seed + index
        place = folder if self.seeds == 1 else folder.with_name(f"{folder.name}-seed-{seed}")
        return _Planned(dataclasses.replace(config, seed=seed), place)


@dataclass(frozen=True)
class _Planned:
    config: RunConfig
    folder: Path


@dataclass(frozen=True)
class Comparison:
    """Runs of several strategies, ranked. `print` shows the ranked table."""

    runs: tuple[RunResult, ...]
    """Every run, by strategy, learning rate and seed as they were given."""
    groups: tuple[Group, ...]
    """The runs' summaries; those that differ in their seed only are one group."""
    chosen: tuple[Group, ...]
    """For each strategy the group of the learning rate that it is ranked by."""
    report: Path
    """The page with the ranked table and the plots."""
    repeated: bool
    """Whether a strategy has more than one run, so that medians are ranked."""

    @property
    def summaries(self) -> list[Summary]:
        """One for each strategy, the best first: the summary of its run, or the medians of its runs."""
        return rank(
            [group.median() for group in self.chosen] if self.repeated else [one.runs[0] for one in self.chosen]
        )

    @property
    def drawn(self) -> list[RunResult]:
        """For each strategy the run that the report draws: the one nearest to the medians."""
        nearest = [group.nearest() for group in self.chosen]
        return [next(run for run in self.runs if run.summary is one) for one in nearest]

    @property
    def failures(self) -> list[str]:
        """Why strategies diverged or failed, in sentences."""
        return [f"{one.strategy}: {one.error}" for one in self.summaries if one.status in ("diverged", "failed")]

    @property
    def caveats(self) -> list[str]:
        """What medians and chosen learning rates do not settle, in sentences."""
        return caveats(self.groups, self.chosen) if self.repeated else []

    def __str__(self) -> str:
        from flockstep.experiments.texts import ranked_text

        return "\n".join([ranked_text(self.summaries), *self.failures, *self.caveats, f"report: {self.report}"])


def compare(
    job: str | Path,
    strategies: Sequence[str | Strategy],
    *,
    simulated: bool = False,
    workers: int = 4,
    network: str | None = None,
    compute: str | None = None,
    faults: Sequence[str] = (),
    seed: int = 0,
    seeds: int = 1,
    epochs: float | None = None,
    steps: int | None = None,
    batch: int | None = None,
    lr: float | None = None,
    lr_grid: Sequence[float] = (),
    schedule: str | None = None,
    split: str = "iid",
    target: float | None = None,
    until_target: bool = False,
    evaluate_every: int | None = None,
    result: str | None = None,
    transport: str | None = None,
    heartbeat: float | None = None,
    step_timeout: float | None = None,
    threads: int = 1,
    imports: Sequence[str] = (),
    out: Path | str | None = None,
) -> Comparison:
    """Run several strategies on one job and rank them: on real processes, or in virtual time with `simulated=True`.

    The same as `flockstep compare`, whose options the arguments are. A comparison that was interrupted goes on where it
    was when it is called again with the same `out`. A script guards a comparison on real processes, as it guards `run`.

    Raises:
        ConfigurationError: before anything starts, for an argument that no run could work with.
        Interrupted: what was finished is in the report.
    """
    _refuse_idle(simulated, network, compute, faults, until_target, transport, heartbeat, step_timeout)
    rates = checked_rates(lr_grid, lr)
    base = RunConfig(
        kind="simulate" if simulated else "train", job=str(job), strategy="", workers=workers, seed=seed, epochs=epochs,
        network=(network or USUAL_NETWORK) if simulated else None, faults=tuple(faults),
        compute=(compute or USUAL_COMPUTE) if simulated else None,
        transport=None if simulated else transport or "shared_memory",
        heartbeat=None if simulated else heartbeat or 5.0, step_timeout=step_timeout, steps=steps,
        batch=batch, lr=lr, schedule=schedule, split=split, target=target,
        until_target=until_target, evaluate_every=evaluate_every, result=result, threads=threads,
        imports=tuple(imports),
    )  # fmt: skip
    grid = Grid(base, tuple(map(str, strategies)), rates, seeds)

    def execute(config: RunConfig, place: Path, title: str, overwrite: bool) -> Summary:
        return carry_out(config, place, overwrite).summary

    return carry_out_all(grid, folder(out, f"compare-{job}"), execute, lambda line: None, lambda found: None)


def checked_rates(grid: Sequence[float], lr: float | None) -> tuple[float, ...]:
    """The learning rates of a grid; none where there is no grid.

    Raises:
        ConfigurationError: a rate that is no number above 0, a rate that is there twice, or `lr` besides.
    """
    if grid and lr is not None:
        text = ",".join(f"{rate:g}" for rate in grid)
        raise ConfigurationError(f"lr {lr:g} and lr_grid {text} say different things; give one of them")
    if not all(0 < rate < math.inf for rate in grid) or len(set(grid)) < len(grid):
        raise ConfigurationError(f"lr_grid must be different numbers > 0, got {tuple(grid)}; give 0.03, 0.1, 0.3")
    return tuple(grid)


def _refuse_idle(
    simulated: bool,
    network: str | None,
    compute: str | None,
    faults: Sequence[str],
    until_target: bool,
    transport: str | None,
    heartbeat: float | None,
    step_timeout: float | None,
) -> None:
    """Refuse arguments that mean nothing for that kind of run."""
    modelled: dict[str, object] = {"network": network, "compute": compute, "faults": faults or None}
    modelled["until_target"] = until_target or None
    real: dict[str, object] = {"transport": transport, "heartbeat": heartbeat, "step_timeout": step_timeout}
    for name, value in (real if simulated else modelled).items():
        if value is not None:
            where = "is for real processes only; leave it or simulated=True out"
            if not simulated:
                where = "matters in virtual time only; add simulated=True"
            raise ConfigurationError(f"{name}={value!r} {where}")


def carry_out_all(
    grid: Grid,
    out: Path,
    execute: Execute,
    say: Callable[[str], None],
    conclude: Callable[[Comparison], None],
) -> Comparison:
    """Carry out the runs of `grid` that `out` does not hold finished already, and rank all.

    `say` hears a line for each run. `conclude` is called with the outcome, also where the comparison is interrupted.

    Raises:
        ConfigurationError: before anything starts, for a strategy or an option that no run could work with.
        Interrupted: what was finished is in the report; the same call goes on from there.
    """
    groups = grid.groups(out)
    planned = [run for group in groups for run in group]
    with owned(out):
        try:
            for number, run in enumerate(planned, start=1):
                title = f"{run.config.job}, {run.config.strategy}{grid.marks(run.config)}"
                _carry_out(run, f"{number} of {len(planned)}: {title}", execute, say)
        except (Interrupted, KeyboardInterrupt):
            if any(RunFolder(run.folder).config_file.exists() for run in planned):
                conclude(_ranked(groups, grid, out))
            raise Interrupted(
                f"interrupted; finished runs are kept: repeat the command with --out {out} to go on"
            ) from None
        found = _ranked(groups, grid, out)
        conclude(found)
        return found


def _carry_out(run: _Planned, title: str, execute: Execute, say: Callable[[str], None]) -> None:
    again = RunFolder(run.folder).unfinished
    if _is_finished(run.config, run.folder):
        say(f"{title}: kept from before")
        return
    try:
        say(f"{title}: {_in_short(execute(run.config, run.folder, title, again))}")
    except Interrupted:
        raise
    except RunError as error:
        say(f"{title}: {RunFolder(run.folder).read_summary().status}: {error}")


def _is_finished(config: RunConfig, folder: Path) -> bool:
    """Whether `folder` holds this very run, finished.

    Raises:
        ConfigurationError: it holds a finished run of another configuration.
    """
    record = RunFolder(folder)
    if not record.config_file.exists() or record.unfinished:
        return False
    if not record.holds_finished(prepare(config)[2]):
        raise ConfigurationError(
            f"{folder} holds a finished run of another configuration; choose another folder with --out, or delete it"
        )
    return True


def _in_short(summary: Summary) -> str:
    metric = "?" if summary.final_metric is None else f"{summary.final_metric:.4f}"
    reached = "" if summary.time_to_target is None else f", target after {summary.time_to_target:.2f} s"
    return f"{summary.metric} {metric}{reached} ({summary.clock} {summary.seconds:.2f} s)"


def _ranked(groups: Sequence[Sequence[_Planned]], grid: Grid, out: Path) -> Comparison:
    """What has run so far, ranked, with its report written."""
    there = [[run.folder for run in group if RunFolder(run.folder).config_file.exists()] for group in groups]
    read = {folder: RunFolder(folder).read() for group in there for folder in group}
    made = [Group(tuple(read[folder].summary for folder in group)) for group in there if group]
    found = Comparison(
        tuple(RunResult(folder, record.config, record.summary) for folder, record in read.items()),
        tuple(made),
        tuple(best(list(rates)) for rates in _by_strategy(made)),
        out / "report.html",
        grid.repeated,
    )
    folders = [run.folder for run in found.drawn]
    summaries = [group.median() if grid.repeated else group.runs[0] for group in found.chosen]
    records = [dataclasses.replace(read[f], summary=one) for f, one in zip(folders, summaries, strict=True)]
    spread = (found.groups, found.chosen) if grid.repeated else None
    write_report(records, found.report, predictions=for_report(folders), spread=spread)
    return found


def _by_strategy(groups: Sequence[Group]) -> list[list[Group]]:
    """The groups of each strategy, one for each learning rate."""
    texts = list(dict.fromkeys(group.runs[0].strategy for group in groups))
    return [[group for group in groups if group.runs[0].strategy == text] for text in texts]


def _names(texts: Sequence[str]) -> list[str]:
    """A folder's name for each strategy; those that are the same once cut and without signs get a mark."""
    slugs = [slug(text) for text in texts]
    marks = [hashlib.sha256(text.encode()).hexdigest()[:8] for text in texts]
    return [f"{s}-{mark}" if slugs.count(s) > 1 else s for s, mark in zip(slugs, marks, strict=True)]


def runs_in(folder: Path) -> list[Path]:
    """The folders of runs that `folder` is or contains.

    Raises:
        ConfigurationError: there is none.
    """
    if RunFolder(folder).config_file.exists():
        return [folder]
    found = sorted(path.parent for path in folder.glob("*/config.toml"))
    if not found:
        raise ConfigurationError(f"{folder} holds no run; give the folder of a run or of a comparison")
    return found
