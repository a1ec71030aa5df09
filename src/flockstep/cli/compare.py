"""A matrix of runs, kept as they finish, ranked at the end."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from flockstep.cli import runs, show
from flockstep.cli.options import slug
from flockstep.drivers.setup import canonical, check, prepare
from flockstep.errors import ConfigurationError, Interrupted, RunError
from flockstep.planning.check import for_report
from flockstep.records.config import RunConfig
from flockstep.records.folder import RunFolder
from flockstep.records.owner import owned
from flockstep.records.summary import Summary
from flockstep.report.html import write_report
from flockstep.report.medians import Group, best, caveats, spreads
from flockstep.report.table import one_by_one, table


@dataclass(frozen=True)
class Matrix:
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

    def _planned(self, config: RunConfig, folder: Path, index: int) -> _Planned:
        seed = config.seed + index
        place = folder if self.seeds == 1 else folder.with_name(f"{folder.name}-seed-{seed}")
        return _Planned(dataclasses.replace(config, seed=seed), place)


@dataclass(frozen=True)
class _Planned:
    config: RunConfig
    folder: Path

    @property
    def title(self) -> str:
        return f"{self.config.job}, {self.config.strategy}"


def compare_all(matrix: Matrix, out: Path, as_json: bool) -> int:
    """Run what `out` does not hold finished already; return the exit code: 1 if a strategy has no useful run.

    Raises:
        ConfigurationError: before anything starts, for a strategy or an option that no run could work with.
        Interrupted: what was finished is in the report; the same command goes on from there.
    """
    groups = matrix.groups(out)
    with owned(out):
        return _compare(groups, matrix, out, as_json)


def _compare(groups: Sequence[Sequence[_Planned]], matrix: Matrix, out: Path, as_json: bool) -> int:
    planned = [run for group in groups for run in group]
    try:
        for number, run in enumerate(planned, start=1):
            _run(run, f"{number} of {len(planned)}: {run.title}{_marks(run, matrix)}")
    except (Interrupted, KeyboardInterrupt):
        _conclude(groups, matrix, out, as_json)
        raise Interrupted(
            f"interrupted; finished runs are kept: repeat the command with --out {out} to go on"
        ) from None
    return _conclude(groups, matrix, out, as_json)


def _marks(run: _Planned, matrix: Matrix) -> str:
    rate = f", lr {run.config.lr:g}" if matrix.rates else ""
    return rate + (f", seed {run.config.seed}" if matrix.seeds > 1 else "")


def runs_in(folder: Path) -> list[Path]:
    """The folders of runs that `folder` is or contains."""
    if RunFolder(folder).config_file.exists():
        return [folder]
    found = sorted(path.parent for path in folder.glob("*/config.toml"))
    if not found:
        raise ConfigurationError(f"{folder} holds no run; give the folder of a run or of a comparison")
    return found


def _names(texts: Sequence[str]) -> list[str]:
    """A folder's name for each strategy; those that are the same once cut and without signs get a mark."""
    slugs = [slug(text) for text in texts]
    marks = [hashlib.sha256(text.encode()).hexdigest()[:8] for text in texts]
    return [f"{s}-{mark}" if slugs.count(s) > 1 else s for s, mark in zip(slugs, marks, strict=True)]


def _run(run: _Planned, title: str) -> None:
    config, folder = run.config, run.folder
    again = RunFolder(folder).unfinished
    if _is_finished(config, folder):
        show.console.print(f"{title}: kept from before", markup=False)
        return
    try:
        summary = runs.run(config, folder, title, again)
        show.console.print(f"{title}: {_in_short(summary)}", markup=False, highlight=False, soft_wrap=True)
    except Interrupted:
        raise
    except RunError as error:
        show.console.print(f"{title}: {RunFolder(folder).read_summary().status}: {error}", markup=False, soft_wrap=True)


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


def _conclude(groups: Sequence[Sequence[_Planned]], matrix: Matrix, out: Path, as_json: bool) -> int:
    """Print the ranked table, write the report of the runs that are ranked; return the exit code."""
    there = [[run.folder for run in group if RunFolder(run.folder).config_file.exists()] for group in groups]
    folders = [folder for group in there for folder in group]
    if not folders:
        return 0
    read = {folder: RunFolder(folder).read() for folder in folders}
    made = [Group(tuple(read[folder].summary for folder in group)) for group in there if group]
    chosen = [best(list(rates)) for rates in _by_strategy(made)]
    summaries = [group.median() for group in chosen] if matrix.repeated else [group.runs[0] for group in made]
    nearest = [group.nearest() for group in chosen]
    ranked = [next(f for f in folders if read[f].summary is run) for run in nearest]
    records = [dataclasses.replace(read[f], summary=one) for f, one in zip(ranked, summaries, strict=True)]
    spread = (made, chosen) if matrix.repeated else None
    path = write_report(records, out / "report.html", predictions=for_report(ranked), spread=spread)
    notes = caveats(made, chosen) if matrix.repeated else []
    failures = [f"{one.strategy}: {one.error}" for one in summaries if one.status in ("diverged", "failed")]
    for sentence in [
        *([] if matrix.repeated else filter(None, map(runs.missed, summaries))),
        *one_by_one([read[f].config for f in ranked]),
        *failures,
        *notes,
    ]:
        show.console.print(f"flockstep: {sentence}", markup=False, highlight=False, soft_wrap=True)
    if as_json:
        rows = [runs.as_data(read[folder].summary, folder) for folder in folders]
        medians = [group.document(group in chosen) for group in made] if matrix.repeated else []
        print(msgspec.json.encode({"report": str(path), "runs": rows, "medians": medians}).decode())
    else:
        show.page().print(table(summaries))
        if matrix.repeated:
            show.page().print(spreads(made, chosen))
        print(f"report: {path}")
    return 1 if failures else 0


def _by_strategy(groups: Sequence[Group]) -> list[list[Group]]:
    """The groups of each strategy, one for each learning rate."""
    texts = list(dict.fromkeys(group.runs[0].strategy for group in groups))
    return [[group for group in groups if group.runs[0].strategy == text] for text in texts]
