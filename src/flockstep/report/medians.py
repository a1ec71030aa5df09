"""Runs of one strategy that differ in seed or learning rate: medians and ranges, and the best rate of each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from rich import box
from rich.markup import escape
from rich.table import Table

from flockstep.records.summary import Summary
from flockstep.report import words
from flockstep.report.ranking import rank

_MIDDLE = (
    "seconds", "sent_per_worker", "received_per_worker", "messages_per_worker", "staleness_mean", "utilisation",
    "divergence", "completeness", "final_loss", "best_metric",
)  # fmt: skip


TITLE = "Medians over seeds [least to largest]; * marks the learning rate that is ranked"
SPREAD = ("strategy", "lr", "runs", "s to target", "final metric", "reached", "diverged or failed")


@dataclass(frozen=True)
class Group:
    """The runs of one strategy at one learning rate, one for each seed."""

    runs: tuple[Summary, ...]

    @property
    def useful(self) -> list[Summary]:
        """Those that neither failed nor diverged."""
        return [run for run in self.runs if run.useful]

    def spread(self, name: str) -> tuple[float, float, float] | None:
        """Least, median and largest of what runs have of a figure; None where no run has it."""
        found = [value for run in self.useful if (value := getattr(run, name)) is not None]
        return (min(found), statistics.median(found), max(found)) if found else None

    def nearest(self) -> Summary:
        """The run whose time to the target, then final metric, are nearest the medians; a useful one if most are."""
        time, metric = self._medians()
        useful = 2 * len(self.useful) > len(self.runs)

        def off(run: Summary) -> tuple[bool, float, float]:
            return run.useful != useful, _apart(run.time_to_target, time), _apart(run.final_metric, metric)

        return min(self.runs, key=off)

    def median(self) -> Summary:
        """The medians as one summary. A run that failed, diverged or missed the target counts as the worst."""
        time, metric = self._medians()
        first = self.nearest()
        middle = {name: spread[1] for name in _MIDDLE if (spread := self.spread(name)) is not None}
        worst = next((run for run in self.runs if not run.useful), first)
        ended = next(iter(self.useful), worst) if 2 * len(self.useful) > len(self.runs) else worst
        return msgspec.structs.replace(
            first,
            **middle,
            status=ended.status,
            error=ended.error,
            time_to_target=time,
            final_metric=metric,
        )

    def _medians(self) -> tuple[float | None, float | None]:
        worst = -math.inf if self.runs[0].higher_is_better else math.inf
        return self._median("time_to_target", math.inf), self._median("final_metric", worst)

    def _median(self, name: str, missing: float) -> float | None:
        figures = [getattr(run, name) if run.useful else None for run in self.runs]
        found = statistics.median(missing if figure is None else figure for figure in figures)
        return found if math.isfinite(found) else None

    def document(self, chosen: bool) -> dict[str, Any]:
        """As plain data; `chosen`: whether the strategy is ranked by this learning rate."""
        keys = ("least", "median", "largest")
        spreads = {name: self.spread(name) for name in ("time_to_target", "final_metric", "seconds")}
        return {
            "strategy": self.runs[0].strategy,
            "lr": self.runs[0].lr,
            "chosen": chosen,
            "seeds": [run.seed for run in self.runs],
            "reached": sum(run.time_to_target is not None for run in self.useful),
            "useless": len(self.runs) - len(self.useful),
            **{n: None if s is None else dict(zip(keys, s, strict=True)) for n, s in spreads.items()},
        }


def _apart(one: float | None, other: float | None) -> float:
    """How far two figures are from each other: nothing if neither is there, beyond measure if one is."""
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    return abs(one - other)


def caveats(groups: Sequence[Group], chosen: Sequence[Group]) -> list[str]:
    """What medians and chosen learning rates do not settle, in sentences."""
    said = []
    if len(groups) > len(chosen):
        said.append(
            "the learning rates marked * were chosen on these very runs and figures, which flatters them: run the "
            "chosen ones with another --seed before you quote them"
        )
    for group in chosen:
        rates = sorted(
            one.runs[0].lr for one in groups if one.runs[0].strategy == group.runs[0].strategy and one.runs[0].lr
        )
        lr = group.runs[0].lr
        if len(rates) > 1 and lr in (rates[0], rates[-1]):
            end = "smallest" if lr == rates[0] else "largest"
            said.append(f"{group.runs[0].strategy}: the best learning rate {lr:g} is the {end} of the grid; extend it")
    seeds = [tuple(run.seed for run in group.runs) for group in groups]
    if len(set(seeds)) > 1:
        said.append(
            f"medians are over different seeds, from {min(map(len, seeds))} to {max(map(len, seeds))} runs each, and "
            "do not compare; repeat the command to complete them"
        )
    return said


def best(groups: Sequence[Group]) -> Group:
    """The group whose medians rank first: time to target, then the final metric."""
    medians = [group.median() for group in groups]
    return groups[medians.index(rank(medians)[0])]


def row(group: Group, chosen: Sequence[Group]) -> list[str]:
    """One line of the table of ranges, in the order of `SPREAD`; a star marks a learning rate that is ranked."""
    first, told = group.runs[0], group.document(group in chosen)
    lr = f"{words.NONE if first.lr is None else f'{first.lr:g}'}{'*' if told['chosen'] else ''}"
    figures = [_range(group.spread("time_to_target")), _range(group.spread("final_metric"))]
    counts = [str(len(group.runs)), *figures, str(told["reached"]), str(told["useless"])]
    return [first.system or first.strategy, lr, *counts]


def spreads(groups: Sequence[Group], chosen: Sequence[Group]) -> Table:
    """Every learning rate of every strategy with its ranges over seeds."""
    made = Table(title=TITLE, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    for heading in SPREAD:
        made.add_column(heading, justify="left" if heading == "strategy" else "right", overflow="fold")
    for group in groups:
        made.add_row(*map(escape, row(group, chosen)))
    return made


def _range(spread: tuple[float, float, float] | None) -> str:
    if spread is None:
        return words.NONE
    least, median, largest = map(words.number, spread)
    return median if least == largest else f"{median} [{least} to {largest}]"
