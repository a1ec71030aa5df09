"""Writes the findings of a comparison as sentences: the fastest run, the reasons, and what the records leave
uncertain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flockstep.records.summary import Summary
from flockstep.report import formatting
from flockstep.report.ranking import places, unranked
from flockstep.report.style import Series
from flockstep.report.table import over_one_worker


@dataclass(frozen=True)
class _Hit:
    """A run that reached the target."""

    one: Series
    time: float
    samples: int | None
    """None in runs of scripts."""

    @property
    def label(self) -> str:
        return self.one.label

    @property
    def summary(self) -> Summary:
        return self.one.record.summary


def findings(series: Sequence[Series], seeds: int = 1) -> list[str]:
    """Return the findings as plain sentences, not escaped for HTML, most important first.

    `series` is in order of rank; each series is the median of `seeds` runs.
    """
    usable = [one for one in series if one.record.summary.useful]
    if not usable:
        return ["No run ended without an error, so there is nothing to compare."]
    if (why := unranked([one.record.summary for one in series])) is not None:
        return [why, *_incidents(usable), *_caveats(usable, seeds)]
    hits = _hits(usable)
    found = [*over_one_worker([one.record.summary for one in series], seeds), *_first(usable, hits, seeds)]
    if len(hits) > 1:
        found += _why(hits[0], hits[-1])
    found += _incidents(usable)
    return [*found, *_caveats(usable, seeds)]


def _hits(series: Sequence[Series]) -> list[_Hit]:
    hits = []
    for one in series:
        s = one.record.summary
        if s.seconds_to_target is not None:
            hits.append(_Hit(one, s.seconds_to_target, s.samples_to_target))
    return sorted(hits, key=lambda hit: hit.time)


def _first(series: Sequence[Series], hits: Sequence[_Hit], seeds: int) -> list[str]:
    best = series[0].record.summary
    if best.target is None:
        return [
            (
                f"There is no target, so runs are ranked by their final {best.metric}: {series[0].label} ended with "
                f"the best value, {formatting.metric(best.final_metric)}."
            )
        ]
    goal = f"{best.metric} {best.target:g}"
    missed = [one for one in series if one.record.summary.seconds_to_target is None]
    if not hits:
        return [
            (
                f"No run reached {goal}. {series[0].label} is ranked first, with a final {best.metric} of "
                f"{formatting.metric(best.final_metric)}."
            )
        ]
    text = f"{hits[0].label} reached {goal} first, after {_clock(hits[0])}."
    if len(hits) > 1:
        second = hits[1]
        if "=" in places([hits[0].summary, second.summary])[0]:
            tie = f" {second.label} followed after {_clock(second)}, which is a tie"
            if seeds == 1:
                text += f"{tie}: the evaluations are too far apart to tell which run was first."
            else:
                text += f"{tie}: the ranges of their seeds overlap too much to tell which run was first."
        else:
            ratio = formatting.times(_ratio(second.time, hits[0].time))
            text += f" {second.label} followed after {_clock(second)}, {ratio} as long."
    if missed:
        who = formatting.listed(
            [f"{one.label} (best {formatting.metric(one.record.summary.best_metric)})" for one in missed]
        )
        text += f" {who} never reached it."
    return [text]


def _why(fast: _Hit, slow: _Hit) -> list[str]:
    """Say whether fewer samples or more samples per second made the faster run faster: time to target is samples to
    target ÷ samples per second. Nothing for scripts, whose samples are not known.
    """
    if fast.samples is None or slow.samples is None:
        return []
    samples = _ratio(fast.samples, slow.samples)
    speed = _ratio(fast.samples * slow.time, fast.time * slow.samples)
    took = formatting.share(_ratio(fast.time, slow.time))
    head = (
        f"The slowest run that reached the target, {slow.label}, took {_clock(slow)}; {fast.label} took {took} of "
        "that time: "
    )
    pace = f"{formatting.times(speed)} as many samples a second"
    if samples > 1.03:
        return [f"{head}it needed {formatting.times(samples)} the samples, but it processed {pace}."]
    if samples < 0.97:
        return [f"{head}it needed only {formatting.times(samples)} the samples, and it processed {pace}."]
    return [f"{head}both needed about as many samples, and it processed {pace}."]


def _incidents(series: Sequence[Series]) -> list[str]:
    found = [f"In {one.label}, {sentence}." for one in series for sentence in one.record.summary.refusals]
    lost = [one.label for one in series if one.record.summary.lost]
    if lost:
        found.append(f"Nodes were lost during {formatting.listed(lost)}; a list below names these nodes.")
    return found


def _caveats(series: Sequence[Series], repeated: int) -> list[str]:
    seeds = {one.record.summary.seed for one in series}
    found = []
    if repeated > 1:
        found.append(
            f"Figures are medians over {repeated} seeds; curves, bars and counts are those of the run nearest to the "
            "medians."
        )
    elif len(seeds) == 1:
        found.append(
            f"All runs used one seed ({min(seeds)}), so small differences can be due to chance; repeat the runs with "
            "other seeds."
        )
    if series[0].record.summary.clock == "virtual":
        found.append(
            "Seconds are virtual: gradients, losses and bytes are real, but times are computed with the compute and "
            "network model above and were not measured."
        )
    return found


def _clock(hit: _Hit) -> str:
    return (
        formatting.seconds(hit.time).replace(" ", " virtual ", 1)
        if hit.summary.clock == "virtual"
        else formatting.seconds(hit.time)
    )


def _ratio(a: float, b: float) -> float:
    return a / b if b else 1.0
