"""A matrix of runs, kept as they finish, ranked at the end."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from flockstep.cli import show
from flockstep.cli.options import slug
from flockstep.cli.runs import as_data, missed
from flockstep.drivers.setup import canonical, check, prepare
from flockstep.errors import ConfigurationError, Interrupted, RunError
from flockstep.planning.check import for_report
from flockstep.records.config import RunConfig
from flockstep.records.folder import RunFolder
from flockstep.records.summary import Summary
from flockstep.report.html import write_report
from flockstep.report.table import table


def compare_all(base: RunConfig, strategies: Sequence[str], out: Path, as_json: bool) -> int:
    """Run every strategy that `out` does not hold finished already; return the exit code.

    Raises:
        ConfigurationError: before anything starts, for a strategy or an option that no run could work with.
        Interrupted: what was finished is in the report; the same command goes on from there.
    """
    configs = [dataclasses.replace(base, strategy=text) for text in strategies]
    for config in configs:
        check(config)
    texts = [canonical(config).title for config in configs]
    for text in texts:
        if texts.count(text) > 1:
            raise ConfigurationError(f"the strategy {text} is given {texts.count(text)} times; give each once")
    folders = [out / name for name in _names(texts)]
    failures: list[str] = []
    try:
        for number, (config, folder) in enumerate(zip(configs, folders, strict=True), start=1):
            _run(config, folder, f"{number} of {len(configs)}: {config.job}, {config.strategy}", failures)
    except (Interrupted, KeyboardInterrupt):
        _conclude(folders, out, as_json)
        raise Interrupted(
            f"interrupted; finished runs are kept: repeat the command with --out {out} to go on"
        ) from None
    _conclude(folders, out, as_json)
    for sentence in failures:
        show.console.print(f"flockstep: {sentence}", markup=False, highlight=False, soft_wrap=True)
    return 1 if failures else 0


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


def _run(config: RunConfig, folder: Path, title: str, failures: list[str]) -> None:
    if _is_finished(config, folder):
        show.console.print(f"{title}: kept from before", markup=False)
        return
    try:
        if config.kind == "simulate":
            with show.bar(title) as progress:
                from flockstep.launchers.simulate import simulate

                summary = simulate(config, folder, progress)
        else:
            with show.standings(title) as standings:
                from flockstep.launchers.train import train

                summary = train(config, folder, standings)
        show.console.print(f"{title}: {_in_short(summary)}", markup=False, highlight=False, soft_wrap=True)
    except Interrupted:
        raise
    except RunError as error:
        failures.append(f"{config.strategy}: {error}")
        show.console.print(f"{title}: failed", markup=False)


def _is_finished(config: RunConfig, folder: Path) -> bool:
    """Whether `folder` holds this very run, finished."""
    record = RunFolder(folder)
    return record.config_file.exists() and record.holds_finished(prepare(config)[2])


def _in_short(summary: Summary) -> str:
    metric = "?" if summary.final_metric is None else f"{summary.final_metric:.4f}"
    reached = "" if summary.time_to_target is None else f", target after {summary.time_to_target:.2f} s"
    return f"{summary.metric} {metric}{reached} ({summary.clock} {summary.seconds:.2f} s)"


def _conclude(folders: Sequence[Path], out: Path, as_json: bool) -> None:
    """Print the ranked table and write the report of the runs that there are."""
    here = [folder for folder in folders if RunFolder(folder).config_file.exists()]
    if not here:
        return
    records = [RunFolder(folder).read() for folder in here]
    summaries = [record.summary for record in records]
    path = write_report(records, out / "report.html", predictions=for_report(here))
    for sentence in filter(None, map(missed, summaries)):
        show.console.print(f"flockstep: {sentence}", markup=False, highlight=False, soft_wrap=True)
    if as_json:
        rows = [as_data(summary, folder) for summary, folder in zip(summaries, here, strict=True)]
        print(msgspec.json.encode({"report": str(path), "runs": rows}).decode())
    else:
        show.page().print(table(summaries))
        print(f"report: {path}")
