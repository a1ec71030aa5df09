"""Texts of an advice: the recommended strategy, the reasons, and the conditions under which the choice would change."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flockstep.planning import worker_losses
from flockstep.planning.criteria import MARGIN, approximates, drops, preference
from flockstep.planning.plan import Outlook, combines
from flockstep.planning.plan_text import RATES, as_much, exposed, late, many, ranged, short
from flockstep.planning.search import Found
from flockstep.planning.step_prediction import ALONE, StepPrediction
from flockstep.report import formatting
from flockstep.report.formatting import number

SHOWN = 3
"""Number of strategies that a sentence lists by name."""
CLOSE = 2.0
"""Ratio of the speeds of two strategies below which the difference is given in percent."""


@dataclass(frozen=True)
class Case:
    """The facts from which the sentences of an advice are made: predictions, requirements and predicted speed-ups."""

    outlook: Outlook
    left: Sequence[StepPrediction]
    """Predictions for the strategies that meet the requirements, best first."""
    speedups: Mapping[str, float]
    """Name of a strategy → predicted speed relative to one worker, under the requirements."""
    meanings: Sequence[str]
    """Meanings of the user's requirements, one phrase for each requirement."""
    alone: str | None = None
    """Reason why training on one worker does not meet the requirements; None if it meets them."""
    found: Mapping[str, Found] = field(default_factory=dict)
    """Name of a strategy → its trials."""
    level: Sequence[StepPrediction] = ()
    """The strategies that trials do not tell from the fastest."""

    @property
    def tried(self) -> bool:
        """Whether trials decided the choice, which is the first of `left`."""
        return self.left[0].name in self.found and self.found[self.left[0].name].seconds is not None

    def speedup(self, found: StepPrediction) -> float:
        """Return the predicted speed of a strategy relative to one worker."""
        return self.speedups[found.name]

    def preference(self, found: StepPrediction) -> float:
        """Return the figure by which a strategy is recommended, in which one worker counts more."""
        return preference(found, self.speedup(found))

    @property
    def second(self) -> StepPrediction | None:
        """The second-best strategy that meets the requirements; None if fewer than two strategies do."""
        return self.left[1] if len(self.left) > 1 else None


def nothing(outlook: Outlook, excluded: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return the sentences that say that no strategy meets the requirements, and why."""
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
    """Return the sentences that tell the user which strategy to use, and with which settings."""
    if case.tried:
        return (_measured_first(case, choice), *_indistinct(case, choice))
    if choice.strategy is None:
        return (f"Use one worker ({_rate(choice)}).", *_rather(case, choice))
    return (_take(case, choice), *_uncompressed(case, choice))


def _measured_first(case: Case, choice: StepPrediction) -> str:
    """Sentence that recommends a strategy by trials."""
    own, alone = case.found[choice.name], case.found.get(ALONE)
    assert own.best is not None
    use = f"Use {short(choice.name)} with learning rate {own.best.lr:.3g}"
    if choice.strategy is None:
        others = [case.found[one.name] for one in case.left[1:] if one.name in case.found]
        times = [one.seconds for one in others if one.seconds is not None]
        best = f"; the best trained {as_much(own.seconds / min(times), 'fast')}" if own.seconds and times else ""
        among = many(len(others), "strategy", "strategies")
        return f"{use}: in trials on the job, none of {among} was faster by more than a tenth{best}."
    use = f"{use} on {many(choice.workers, 'worker')}: in trials on the job"
    if alone is None or alone.seconds is None or own.seconds is None:
        return f"{use}, it reached the goal first; one worker did not reach the goal."
    low, high = alone.range[0] / own.range[1], alone.range[1] / own.range[0]
    between = f"{number(low, 2)} to {number(high, 2)}" if math.isfinite(high) else f"at least {number(low, 2)}"
    return (
        f"{use}, it trained {as_much(alone.seconds / own.seconds, 'fast')} as one worker at the best learning rate of "
        f"each ({between} times over {many(len(own.at_best_rate), 'seed')})."
    )


def _indistinct(case: Case, choice: StepPrediction) -> tuple[str, ...]:
    """Sentence about the strategies that trials do not tell from the fastest."""
    others = [short(one.name) for one in case.level if one is not choice]
    if not others:
        return ()
    more = [many(len(others) - SHOWN, "other")] if len(others) > SHOWN else []
    told = formatting.listed([*others[:SHOWN], *more])
    return (f"Within the ranges of the trials, {told} trained as fast; {short(choice.name)} is the simplest of them.",)


def _rate(found: StepPrediction) -> str:
    return f"{formatting.number(found.samples_per_second)} samples per second"


def _take(case: Case, choice: StepPrediction) -> str:
    """Sentence that recommends a strategy by its predicted speed-up, because samples per second alone do not show an
    advantage over one worker.
    """
    name, workers = short(choice.name), many(choice.workers, "worker")
    more = as_much(choice.samples_per_second / case.outlook.alone.samples_per_second)
    pace = f"it processes {more} samples per second as one worker ({formatting.number(choice.samples_per_second)})"
    if case.alone is None or case.speedup(choice) >= 1:
        return (
            f"Use {name} on {workers}. It is predicted to train {as_much(case.speedup(choice), 'fast')} as one worker: "
            f"{pace} and {_needs(case.outlook, choice)}."
        )
    return (
        f"One worker is predicted to need only {formatting.share(case.speedup(choice))} of the time, but is ruled out: "
        f"{case.alone}. With this requirement, use {name} on {workers}: {pace}, but "
        f"{_needs(case.outlook, choice)}."
    )


def _needs(outlook: Outlook, found: StepPrediction) -> str:
    """Text of the number of samples that a strategy needs, relative to one worker; a formula's number is assumed."""
    verb = "needs" if found.name in outlook.measured else "is assumed to need"
    return f"{verb} {as_much(outlook.relative_samples(found))} samples for the same accuracy"


def _rather(case: Case, choice: StepPrediction) -> tuple[str, ...]:
    """Return sentences that say why the fastest strategy, or the one with the most samples per second, is not
    recommended.
    """
    others = [one for one in case.left if one.strategy is not None and combines(one)]
    if not others:
        return ("No other strategy meets the requirements.",)
    if case.outlook.workers == 1:
        return ()
    fastest = max(others, key=case.speedup)
    if case.speedup(fastest) > case.speedup(choice):
        return (_doubtful(case, fastest),)
    best = max(others, key=lambda one: one.samples_per_second)
    ratio = best.samples_per_second / choice.samples_per_second
    said = (
        f"On {many(best.workers, 'worker')} of {case.outlook.site.cluster.name}, {short(best.name)} processes the most "
        f"samples per second, {formatting.number(best.samples_per_second)} ({as_much(ratio)} as one worker)"
    )
    if ratio < 1 or case.speedup(best) >= case.speedup(choice):
        return (f"{said}.",)
    return (f"{said}, but {_dear(case, best)}.",)


def _doubtful(case: Case, fastest: StepPrediction) -> str:
    """Sentence that says why a strategy that is predicted to be faster than one worker is not recommended."""
    gain = formatting.number(math.floor(100 * case.speedup(fastest)) / 100, 3)  # never rounded up to the margin
    return (
        f"{short(fastest.name)} on {many(fastest.workers, 'worker')} is predicted to train {gain} times as fast as one "
        f"worker, but {uncertain()}."
    )


def uncertain() -> str:
    """Text of the reason why one worker is recommended although more workers are predicted to be a little faster."""
    return (
        f"predictions err by up to {formatting.share(MARGIN - 1)}, so several workers are recommended only if they are "
        f"predicted to train at least {MARGIN:g} times as fast"
    )


def _dear(case: Case, found: StepPrediction) -> str:
    return (
        f"{_needs(case.outlook, found)}, so it is predicted to train {as_much(case.speedup(found), 'fast')} as "
        "one worker"
    )


def _uncompressed(case: Case, choice: StepPrediction) -> tuple[str, ...]:
    """Sentence on why no compression is recommended, if a strategy with compression would be slower."""
    compressed = [one for one in case.left if approximates(one) and not drops(one)]
    if approximates(choice) or not compressed:
        return ()
    best = max(compressed, key=case.speedup)
    if case.speedup(best) >= case.speedup(choice):
        return ()
    ratio = best.samples_per_second / choice.samples_per_second
    slower = as_much(case.speedup(best) / case.speedup(choice), "fast")
    said = f"Do not compress: {short(best.name)}, the best strategy with compression,"
    if ratio <= 1.005:
        return (f"{said} is predicted to train {slower} as {short(choice.name)}.",)
    return (f"{said} processes {as_much(ratio)} samples per second as {short(choice.name)}, but {_dear(case, best)}.",)


def reasons(case: Case, choice: StepPrediction) -> tuple[str, ...]:
    """Return the reasons for the recommendation, one sentence each."""
    outlook = case.outlook
    latency, bandwidth = outlook.site.link
    said = []
    if bandwidth < float("inf"):
        takes = outlook.task.nbytes / bandwidth
        said.append(
            f"Sending the model ({formatting.size(outlook.task.nbytes)}) over the slowest link takes "
            f"{formatting.seconds(takes + latency)}; computing a gradient takes "
            f"{formatting.seconds(outlook.alone.seconds)} on the fastest worker."
        )
    if choice.strategy is not None:
        said.append(_step(choice))
    departs = outlook.departures(choice)
    if departs:
        said.append(
            f"{short(choice.name)} differs from training on one worker: {'; '.join(departs)}. It therefore "
            f"{_needs(outlook, choice)} as one worker."
        )
    if case.second is not None and (not case.tried or case.second.name in outlook.measured):
        needs = f" and {_needs(outlook, case.second)} as one worker" if case.second.strategy is not None else ""
        said.append(f"The second-best choice is {short(case.second.name)}: it processes {_rate(case.second)}{needs}.")
    said += [f"Taken into account: {one}." for one in case.meanings]
    if choice.strategy is not None and outlook.site.cluster.failures:
        said.append(worker_losses.sentence(choice, outlook))
    if choice.strategy is not None:
        said.append(_graded(outlook, choice))
    return tuple(said)


def _step(choice: StepPrediction) -> str:
    return (
        f"A step of {short(choice.name)} takes {ranged(choice)}; a worker computes for "
        f"{formatting.share(choice.utilization)} of this time and sends {formatting.size(choice.sent_bytes)} "
        f"(from a rehearsal)."
    )


def _graded(outlook: Outlook, choice: StepPrediction) -> str:
    row, versions = outlook.criteria(choice), late(outlook, choice)
    parts = [f"the learning rate {_RATES[row.learning_rate]}"]
    if versions:
        parts.append(f"updates are {formatting.number(versions, 2)} versions late on average")
    parts.append(many(row.hyper_parameters, "additional hyper-parameter") if row.hyper_parameters else _NO_MORE)
    if row.exposure is not None:
        parts.append(f"all workers wait for {exposed(row.exposure)} of the slowest worker's delay")
    parts.append(f"reproducing a result exactly is {row.reproducible}")
    return f"By the criteria of table 2 of Langer et al. (2020), the strategy is {row.technique}: {', '.join(parts)}."


_NO_MORE = "there are no additional hyper-parameters"
_RATES = {"higher": "may grow with the number of workers", "likely": f"is {RATES['likely']}", "lower": "must be lower"}


def changes(case: Case, choice: StepPrediction) -> tuple[str, ...]:
    """Return sentences about the conditions under which another strategy becomes better, about the lead over the
    second-best strategy, and about ways to measure it.
    """
    said = list[str]()
    second = case.second
    if second is None:
        return ()
    ratio = second.samples_per_second / choice.samples_per_second
    ahead = preference(second, second.samples_per_second) / preference(choice, choice.samples_per_second)
    if case.outlook.relative_samples(second) > case.outlook.relative_samples(choice) and ahead > 1.005:
        said.append(
            f"if staleness, approximation and separate models did not slow down the progress of this job, "
            f"{short(second.name)} would be recommended, because it processes {as_much(ratio)} samples per second"
        )
    elif 0 < case.preference(second) <= case.preference(choice):
        said.append(_faster(short(second.name), case.preference(choice) / case.preference(second)))
    return (*said, *_measured(case.outlook, choice, second))


def _faster(name: str, ratio: float) -> str:
    if ratio < 1.001:
        return f"if {name} were less than 0.1 % faster, it would be recommended"
    much = f"{formatting.share(ratio - 1)} faster" if ratio < CLOSE else f"{formatting.number(ratio, 2)} times as fast"
    return f"if {name} were {much}, it would be recommended"


def _measured(outlook: Outlook, choice: StepPrediction, second: StepPrediction) -> tuple[str, ...]:
    """The options that try choice and runner-up with real gradients and this plan's times, if there is a job."""
    if outlook.task.job is None:
        return ()
    tried = (choice, second)
    options = " ".join(f"-s {shlex.quote(short(one.name))}" for one in tried if one.strategy is not None)
    names = " and ".join(short(one.name) for one in tried)
    return (f"to measure the time to target of {names}, repeat the command with --simulate {options}",)
