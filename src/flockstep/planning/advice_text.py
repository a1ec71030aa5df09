"""Sentences of advice: the recommended strategy, the reasons, and the conditions under which the choice would
change.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flockstep.planning import worker_losses
from flockstep.planning.criteria import approximates, drops
from flockstep.planning.plan import Outlook, combines
from flockstep.planning.plan_text import RATES, as_much, exposed, late, many, short
from flockstep.planning.scaling import Crossover
from flockstep.planning.step_prediction import StepPrediction
from flockstep.report import formatting
from flockstep.report.layers import amount
from flockstep.report.layouts import speed

FEW = 0.001
"""Share of steps below which the advice says "with the first slow spells", not which share of steps begins a spell."""
CLOSE = 2.0
"""Ratio up to which a speed advantage is given in percent."""


@dataclass(frozen=True)
class Case:
    """The facts from which the sentences of an advice are made: predictions, requirements, and the worth of each
    strategy.
    """

    outlook: Outlook
    left: Sequence[StepPrediction]
    """Strategies that meet the requirements, the best first."""
    worths: Mapping[str, float]
    """Name of a strategy → its predicted speed relative to one worker, under the requirements."""
    meanings: Sequence[str]
    """Meanings of the user's requirements, as one phrase for each."""
    alone: str | None = None
    """Reason why one worker does not meet the requirements; None if one worker meets them."""
    tried: bool = False
    """Whether the best remaining strategy was chosen by trials."""

    def worth(self, found: StepPrediction) -> float:
        """The strategy's predicted speed relative to one worker."""
        return self.worths[found.name]

    @property
    def second(self) -> StepPrediction | None:
        """The runner-up; None if there is none."""
        return self.left[1] if len(self.left) > 1 else None


def nothing(outlook: Outlook, excluded: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Sentences that no strategy meets the requirements, with the reasons."""
    why, memory, alone = dict(excluded), outlook.site.cluster.memory, outlook.alone
    single = f"{alone.name}: {why.pop(alone.name)}"
    too_large = memory is not None and alone.memory > memory
    if too_large:
        single = f"{alone.name} needs {formatting.size(alone.memory)} and has {formatting.size(memory)}"
    others = list(why.values())
    said = [single, *(f"{many(others.count(one), 'strategy', 'strategies')}: {one}" for one in dict.fromkeys(others))]
    way = "plan for machines with more memory" if too_large else "leave out one --require"
    return (f"No strategy meets the requirements: {'; '.join(said)}.", f"To get advice, {way}.")


def recommendation(case: Case, choice: StepPrediction) -> tuple[str, ...]:
    """Return sentences of advice to the user: which strategy to use, with which settings."""
    if choice.strategy is None:
        rate = formatting.number(choice.samples_per_second)
        return (f"Stay on one worker: {rate} samples a second.", *_rather(case, choice))
    return (_take(case, choice), *_uncompressed(case, choice))


def _take(case: Case, choice: StepPrediction) -> str:
    """Sentence that recommends a strategy by its worth, because samples per second alone do not show an advantage over
    one worker.
    """
    worth = case.worth(choice)
    take = f"Take {short(choice.name)} on {many(choice.workers, 'worker')}"
    more = as_much(choice.samples_per_second / case.outlook.alone.samples_per_second)
    more = f"{more} as one worker"
    rate = f"{formatting.number(choice.samples_per_second)} samples a second"
    if case.tried:
        return f"{take}: in trials it reached the target first."
    if case.alone is None or worth >= 1:
        return f"{take}: it is predicted to advance {as_much(worth, 'quickly')} as one worker ({rate}, {more})."
    return (
        f"One worker would reach the target sooner, in {formatting.share(worth)} of the time, but is ruled out: "
        f"{case.alone}. {take} only if that is required: {rate} are {more}, but {_dear(case, choice)}."
    )


def _rather(case: Case, choice: StepPrediction) -> tuple[str, ...]:
    """Sentences on why the strategy with the most samples per second is not recommended."""
    others = [one for one in case.left if one.strategy is not None and combines(one)]
    if not others:
        return ("No other strategy meets the requirements.",)
    if case.outlook.workers == 1:
        return ()
    best = max(others, key=lambda one: one.samples_per_second)
    ratio = best.samples_per_second / choice.samples_per_second
    said = (
        f"{many(best.workers, 'worker')} of {case.outlook.site.cluster.name} process at most "
        f"{formatting.number(best.samples_per_second)} samples a second, with {short(best.name)}, or {as_much(ratio)}"
    )
    if ratio < 1 or case.worth(best) >= case.worth(choice):
        return (f"{said}.",)
    return (f"{said}, but {_dear(case, best)}.",)


def _dear(case: Case, found: StepPrediction) -> str:
    relative_samples = formatting.number(case.outlook.relative_samples(found))
    return (
        f"{relative_samples} of its samples are predicted to do the work of one sample of plain training, so that it "
        f"advances {as_much(case.worth(found), 'quickly')} as one worker"
    )


def _uncompressed(case: Case, choice: StepPrediction) -> tuple[str, ...]:
    """Sentence on why no compression is recommended, if a strategy with compression would be worth less."""
    compressed = [one for one in case.left if approximates(one) and not drops(one)]
    if approximates(choice) or not compressed:
        return ()
    best = max(compressed, key=case.worth)
    if case.worth(best) >= case.worth(choice):
        return ()
    ratio = best.samples_per_second / choice.samples_per_second
    if ratio <= 1.005:
        slower = as_much(case.worth(best) / case.worth(choice), "quickly")
        return (f"Do not compress: the best strategy with compression, {short(best.name)}, would advance {slower}.",)
    said = (
        f"Compression would process {as_much(ratio)} samples, with {short(best.name)}, but {_dear(case, best)}, "
        f"and {short(choice.name)} {as_much(case.worth(choice), 'quickly')}."
    )
    return (said,)


def reasons(case: Case, choice: StepPrediction) -> tuple[str, ...]:
    """Reasons for the recommendation, one sentence each."""
    outlook = case.outlook
    latency, bandwidth = outlook.site.link
    said = []
    if bandwidth < float("inf"):
        takes = outlook.task.nbytes / bandwidth
        said.append(
            f"The model has {formatting.size(outlook.task.nbytes)}, which take the slowest link "
            f"{formatting.seconds(takes + latency)}; a gradient takes "
            f"{formatting.seconds(outlook.alone.seconds)} on the fastest worker."
        )
    if choice.strategy is not None:
        said.append(_step(choice))
    departs = outlook.departures(choice)
    if departs:
        said.append(
            f"It departs from plain training: {', '.join(departs)}. "
            f"{formatting.number(outlook.relative_samples(choice))} "
            "of its "
            "samples are predicted to do the work of one sample of plain training, so that it advances "
            f"{as_much(case.worth(choice), 'quickly')} as one worker."
        )
    if case.second is not None:
        said.append(
            f"The runner-up is {short(case.second.name)}, with {formatting.number(case.second.samples_per_second)} "
            f"samples a second; {formatting.number(outlook.relative_samples(case.second))} of its samples do the work "
            "of one sample of plain training."
        )
    said += [f"Taken into account: {one}." for one in case.meanings]
    if choice.strategy is not None and outlook.site.cluster.failures:
        said.append(worker_losses.sentence(choice, outlook))
    if choice.strategy is not None:
        said.append(_graded(outlook, choice))
    return tuple(said)


def _step(choice: StepPrediction) -> str:
    return (
        f"A step takes {formatting.seconds(choice.seconds)}, of which a worker spends "
        f"{formatting.share(choice.utilization)} computing; "
        f"it sends {formatting.size(choice.sent_bytes)} "
        f"({'rehearsed' if choice.source == 'rehearsal' else 'extrapolated'})."
    )


def _graded(outlook: Outlook, choice: StepPrediction) -> str:
    row, versions = outlook.criteria(choice), late(outlook, choice)
    parts = [f"the learning rate {_RATES[row.learning_rate]}"]
    if versions:
        parts.append(f"updates are {formatting.number(versions, 2)} versions late on average")
    parts.append(many(row.hyper_parameters, "additional hyper-parameter") if row.hyper_parameters else _NO_MORE)
    if row.exposure is not None:
        parts.append(f"all workers wait for {exposed(row.exposure)} of the slowest worker's delay")
    parts.append(f"repeating a result exactly is {row.reproducible}")
    return f"In the terms of table 2 of Langer et al. (2020), the strategy is {row.technique}: {', '.join(parts)}."


_NO_MORE = "there are no additional hyper-parameters"
_RATES = {"higher": "may grow with the number of workers", "likely": f"is {RATES['likely']}", "lower": "must be lower"}


def changes(case: Case, choice: StepPrediction, crossovers: Sequence[Crossover], tried: bool) -> tuple[str, ...]:
    """Sentences on the conditions under which another strategy becomes better, the distance of the runner-up, and ways
    to find out.
    """
    said = []
    for one in crossovers:
        other, side = (one.above, "above") if one.below == choice.name else (one.below, "below")
        said.append(f"{quantity(one, side)} it would be {short(other)}")
    second = case.second
    if second is None:
        return tuple(said)
    ratio = second.samples_per_second / choice.samples_per_second
    if case.outlook.relative_samples(second) > case.outlook.relative_samples(choice) and ratio > 1.005:
        said.append(
            f"if staleness, approximation and separate models cost this job nothing, {short(second.name)} would "
            f"be better: "
            f"it processes {as_much(ratio)} samples"
        )
    elif 0 < case.worth(second) <= case.worth(choice):
        said.append(
            f"{short(second.name)} would be advised if it were {_faster(case.worth(choice) / case.worth(second))}"
        )
    return (*said, *(() if tried else _measured(case.outlook, choice, second)))


def _faster(ratio: float) -> str:
    if ratio < 1.001:
        return "less than 0.1 % faster: both are practically equal"
    return f"{formatting.share(ratio - 1)} faster" if ratio < CLOSE else f"{formatting.number(ratio, 2)} times as fast"


def _measured(outlook: Outlook, choice: StepPrediction, second: StepPrediction) -> tuple[str, ...]:
    """The options that try choice and runner-up with real gradients and this plan's times, if there is a job."""
    if outlook.task.job is None:
        return ()
    named = [shlex.quote(short(one.name)) for one in (choice, second) if one.strategy is not None]
    options = " ".join(f"-s {one}" for one in named)
    return (f"the measured time to target of both strategies: repeat the command with --simulate {options}",)


def quantity(one: Crossover, side: str) -> str:
    """Text that a crossover's quantity is above or below its value."""
    if one.quantity == "bandwidth":
        return f"{side} {speed(one.value)} (now {speed(one.here)})"
    if one.quantity == "parameters":
        return f"{side} {amount(one.value)} parameters (now {amount(one.here)})"
    if one.value < FEW:
        return "as soon as workers are sometimes slow (in fewer than 0.1 % of steps)"
    return f"where a worker becomes slow in more than {formatting.share(one.value)} of its steps"
