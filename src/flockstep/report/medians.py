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

    def median(self) -> Summary:
        """The medians as one summary. A run that failed, diverged or missed the target counts as the worst."""
        first = self.runs[0]
        metric = self._median("final_metric", -math.inf if first.higher_is_better else math.inf)
        middle = {name: spread[1] for name in _MIDDLE if (spread := self.spread(name)) is not None}
        worst = next((run for run in self.runs if not run.useful), first)
        ended = next(iter(self.useful), worst) if 2 * len(self.useful) > len(self.runs) else worst
        return msgspec.structs.replace(
            first,
            **middle,
            status=ended.status,
            error=ended.error,
            time_to_target=self._median("time_to_target", math.inf),
            final_metric=metric,
        )

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
