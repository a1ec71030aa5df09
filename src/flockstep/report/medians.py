"""Combines runs of one strategy that differ in seed or learning rate: medians, ranges, and the best learning rate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from flockstep.records.summary import Summary
from flockstep.report import formatting
from flockstep.report.ranking import names, rank
from flockstep.report.terminal import TableColumn, TextTable

_MIDDLE = (
    "seconds", "sent_bytes_per_worker", "received_bytes_per_worker", "messages_per_worker", "staleness_mean",
    "utilization",
    "divergence", "completeness", "final_loss", "best_metric",
)  # fmt: skip


@dataclass(frozen=True)
class RepeatedRuns:
    """The runs of one strategy at one learning rate, one for each seed."""

    runs: tuple[Summary, ...]

    @property
    def contender(self) -> tuple[str, int]:
        """Strategy and number of workers, which runs at other learning rates share."""
        return self.runs[0].strategy, self.runs[0].workers

    @property
    def useful(self) -> list[Summary]:
        """The runs that neither failed nor diverged."""
        return [run for run in self.runs if run.useful]

    @property
    def reached(self) -> int:
        """Number of useful runs that reached the target."""
        return sum(run.seconds_to_target is not None for run in self.useful)

    def spread(self, name: str) -> tuple[float, float, float] | None:
        """Return minimum, median and maximum of a field of `Summary` over the useful runs; None if no run has it."""
        found = [value for run in self.useful if (value := getattr(run, name)) is not None]
        return (min(found), statistics.median(found), max(found)) if found else None

    def nearest(self) -> Summary:
        """The run, useful if most are, that is nearest to the medians by time to target, then by final metric."""
        time, metric = self._medians()
        useful = 2 * len(self.useful) > len(self.runs)

        def off(run: Summary) -> tuple[bool, float, float]:
            return run.useful != useful, _apart(run.seconds_to_target, time), _apart(run.final_metric, metric)

        return min(self.runs, key=off)

    def median(self) -> Summary:
        """The medians over the runs as one `Summary`; a run that is not useful or missed the target is the worst."""
        time, metric = self._medians()
        first = self.nearest()
        middle = {name: spread[1] for name in _MIDDLE if (spread := self.spread(name)) is not None}
        worst = next((run for run in self.runs if not run.useful), first)
        ended = next(iter(self.useful), worst) if 2 * len(self.useful) > len(self.runs) else worst
        times = [math.inf if one.seconds_to_target is None else one.seconds_to_target for one in self.useful]
        times += [math.inf] * (len(self.runs) - len(self.useful))  # the longest time is infinite if a run missed it
        return msgspec.structs.replace(
            first,
            **middle,
            status=ended.status,
            error=ended.error,
            seconds_to_target=time,
            seconds_to_target_range=None if time is None else (min(times), max(times)),
            final_metric=metric,
        )

    def _medians(self) -> tuple[float | None, float | None]:
        worst = -math.inf if self.runs[0].higher_is_better else math.inf
        return self._median("seconds_to_target", math.inf), self._median("final_metric", worst)

    def _median(self, name: str, missing: float) -> float | None:
        figures = [getattr(run, name) if run.useful else None for run in self.runs]
        found = statistics.median(missing if figure is None else figure for figure in figures)
        return found if math.isfinite(found) else None

    def document(self, chosen: bool) -> dict[str, Any]:
        """Return the runs' medians for JSON; `chosen` says whether the strategy is ranked by this learning rate."""
        keys = ("least", "median", "largest")
        spreads = {name: self.spread(name) for name in ("seconds_to_target", "final_metric", "seconds")}
        return {
            "strategy": self.runs[0].strategy,
            "workers": self.runs[0].workers,
            "lr": self.runs[0].lr,
            "chosen": chosen,
            "seeds": [run.seed for run in self.runs],
            "reached": self.reached,
            "useless": len(self.runs) - len(self.useful),
            **{n: None if s is None else dict(zip(keys, s, strict=True)) for n, s in spreads.items()},
        }


def _apart(one: float | None, other: float | None) -> float:
    """Distance of two figures: 0 if both are missing, infinite if one is missing."""
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    return abs(one - other)


def caveats(groups: Sequence[RepeatedRuns], chosen: Sequence[RepeatedRuns]) -> list[str]:
    """Return sentences about what remains uncertain when medians or the best learning rates are compared."""
    said = []
    if len(groups) > len(chosen):
        said.append(
            "the learning rates marked * were chosen on these same runs, so their figures are optimistic: repeat the "
            "runs at these rates with another --seed before quoting the figures"
        )
    for group, name in zip(chosen, names([group.runs[0] for group in chosen]), strict=True):
        same = [one for one in groups if one.contender == group.contender]
        rates = sorted(one.runs[0].lr for one in same if one.runs[0].lr)
        lr = group.runs[0].lr
        if len(rates) > 1 and lr in (rates[0], rates[-1]):
            end = "smallest" if lr == rates[0] else "largest"
            said.append(f"{name}: the best learning rate {lr:g} is the {end} of the grid; extend the grid")
        said += _missed(same, group, name)
    seeds = [tuple(run.seed for run in group.runs) for group in groups]
    if len(set(seeds)) > 1:
        said.append(
            f"medians are over different numbers of seeds, from {min(map(len, seeds))} to {max(map(len, seeds))} runs "
            "each, and are not comparable; repeat the command to complete the missing runs"
        )
    return said


def _missed(rates: Sequence[RepeatedRuns], chosen: RepeatedRuns, name: str) -> list[str]:
    """A sentence if most runs at the best learning rate missed the target, with the best metric that was reached."""
    first, runs = chosen.runs[0], [run for group in rates for run in group.runs]
    tops = [(run.best_metric, run.lr) for group in rates for run in group.useful if run.best_metric is not None]
    if first.target is None or chosen.median().seconds_to_target is not None or not tops:
        return []
    reached = sum(group.reached for group in rates)
    top, lr = (max if first.higher_is_better else min)(tops, key=lambda pair: pair[0])
    word = "highest" if first.higher_is_better else "lowest"
    among, at = (f" at {len(rates)} learning rates", f", at {lr:g}") if len(rates) > 1 else ("", "")
    said = (
        f"{name} reached the target {first.target:g} in {reached or 'none'} of {len(runs)} runs{among}: the "
        f"{word} {first.metric} was {formatting.metric(top)}{at}; train longer (--epochs, --steps), try other learning "
        "rates, or change --target"
    )
    return [said]


def best(groups: Sequence[RepeatedRuns]) -> RepeatedRuns:
    """Return the group of runs whose medians rank first, by time to target, then by final metric."""
    medians = [group.median() for group in groups]
    return groups[medians.index(rank(medians)[0])]


def spreads(groups: Sequence[RepeatedRuns], chosen: Sequence[RepeatedRuns]) -> TextTable:
    """Return the table of medians and ranges over seeds, for every learning rate of every strategy."""
    several, seeds = len(groups) > len(chosen), max(len(group.runs) for group in groups)

    def rate(group: RepeatedRuns) -> str:
        lr = group.runs[0].lr
        return f"{formatting.NONE if lr is None else f'{lr:g}'}{'*' * (several and group in chosen)}"

    title = f"Medians over {seeds} seeds [smallest to largest value]" if seeds > 1 else "Every learning rate"
    return TextTable.of(
        [
            TableColumn("strategy", text=True, cell=lambda row: row[0]),
            TableColumn("lr", rank=1, cell=lambda row: rate(row[1])),
            TableColumn("runs", rank=3, cell=lambda row: str(len(row[1].runs))),
            TableColumn("seconds to target", cell=lambda row: _range(row[1].spread("seconds_to_target"))),
            TableColumn("final metric", cell=lambda row: _range(row[1].spread("final_metric"))),
            TableColumn("at target", rank=2, cell=lambda row: str(row[1].reached)),
            TableColumn("diverged or failed", rank=4, cell=lambda row: str(len(row[1].runs) - len(row[1].useful))),
        ],
        zip(names([group.runs[0] for group in groups]), groups, strict=True),
        title=f"{title}; * marks the learning rate that is ranked" if several else title,
    )


def _range(spread: tuple[float, float, float] | None) -> str:
    if spread is None:
        return formatting.NONE
    least, median, largest = map(formatting.number, spread)
    return median if least == largest else f"{median} [{least} to {largest}]"
