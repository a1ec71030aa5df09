"""Advice on the choice of a strategy, from Table 2 of Langer et al. (2020), the plan's figures and the user's
requirements: the recommendation, its reasons, and the conditions under which it would change.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from flockstep.errors import UnknownName
from flockstep.planning import worker_losses
from flockstep.planning.criteria import (
    MARGIN,
    approximates,
    count,
    criteria,
    departures,
    drops,
    is_central,
    is_repeatable,
    is_synchronous,
    preference,
    repeated,
)
from flockstep.planning.plan import Outlook, combines
from flockstep.planning.search import Found, measured
from flockstep.planning.step_prediction import ALONE, StepPrediction
from flockstep.planning.words import as_much, exposed, many, ranged, short
from flockstep.report.formatting import listed, number, seconds, share, size

REQUIREMENTS = {
    "unbalanced": "the data of the workers differ in kind or size, as if sorted by label",
    "reproducible": "repeating the run must give the same result",
    "elastic": "workers join and leave during the run",
    "private": "data may not leave the machines that store them",
    "slow-links": "links are sometimes slower than the cluster's description says",
}
"""Name of a requirement that a user can state → meaning of the requirement."""
DROPS = "part of each gradient is dropped without error feedback, which reduces the accuracy (use feedback=residual)"
"""Text of the reason why a strategy that loses part of each gradient is never recommended."""
UNCOUNTED = "no updates are recorded, so the number of samples that the strategy needs is not known"
"""Text of the reason why a strategy without recorded updates is recommended for its speed only after trials."""
LEAVING = {
    "others": "workers compute on samples of other workers",
    "sent": "messages contain training samples (the inputs of the first layer)",
}
"""Value of `Traits.samples` → text that says how samples leave the machines that store them."""
SIMPLER = 1.1
"""Largest time to the goal of a simpler strategy that is advised, as a multiple of the fastest one's."""
SLOWER = 4.0
"""Factor by which communication is assumed to be slower under the requirement slow-links."""

SHOWN = 3
"""Number of strategies that a sentence lists by name."""


def advise(
    outlook: Outlook, requirements: tuple[str, ...] = (), found: Sequence[Found] = (), candidates: Sequence[str] = ()
) -> Advice:
    """Recommend a strategy that meets the requirements.

    With trials in `found`, the choice is the simplest of the strategies whose median time lies within the range of the
    fastest one's seeds and is at most `SIMPLER` times its median: the one with the fewest hyper-parameters, and one
    worker before all. `candidates` are the strategies that were to be tried; if some of them were not tried, the advice
    says so.

    Without trials, the choice is the strategy with the highest predicted speed-up, or one worker if it meets the
    requirements and no speed-up reaches `criteria.MARGIN`.

    Raises:
        UnknownName: a requirement does not exist.
    """
    outlook = measured(outlook, found)
    requirements = asked(outlook, requirements)
    refused = {one.strategy: f"cannot be tried: {one.refused}" for one in found if one.refused and not one.trials}
    left, excluded = list[StepPrediction](), list[tuple[str, str]]()
    tried = {one.strategy: one for one in found if one.trials}
    for one in outlook.predictions:
        why = unfit(one, outlook, requirements) or refused.get(one.name)
        if why is None and not counted(one) and one.name not in tried:
            why = UNCOUNTED
        if why is None:
            left.append(one)
        else:
            excluded.append((one.name, why))
    single = outlook.alone.samples_per_second
    speedups = {one.name: value(one, outlook, requirements) / single for one in outlook.predictions}
    told = _measured(tried, speedups)
    speedups |= told
    left.sort(key=lambda one: (*_rank(tried.get(one.name)), -preference(one, speedups[one.name])))
    level = _level(left, tried)
    if level:
        # One worker, then the fewest hyper-parameters, then the fewest differences from one worker.
        simple = {one.name: (0 if one.strategy is None else 1 + count(one.strategy)) for one in level}
        choice = min(level, key=lambda one: (simple[one.name], len(departures(one, outlook.site))))
        left.remove(choice)
        left.insert(0, choice)
    return Advice(
        outlook,
        tuple(left),
        requirements,
        tuple(excluded),
        speedups,
        limits=frozenset(name for name in told if tried[name].seconds is None),
        tried=tried,
        level=tuple(level),
        untried=tuple(name for name in candidates if left and name not in tried and name not in refused),
    )


def asked(outlook: Outlook, requirements: tuple[str, ...]) -> tuple[str, ...]:
    """Return the user's requirements, together with the requirements that follow from the cluster.

    Raises:
        UnknownName: a requirement does not exist.
    """
    require_known(requirements)
    return tuple(dict.fromkeys((*requirements, *(["elastic"] if outlook.site.cluster.comes_and_goes else []))))


def require_known(requirements: Iterable[str]) -> None:
    """Refuse a requirement that does not exist.

    Raises:
        UnknownName: a requirement does not exist.
    """
    for name in requirements:
        if name not in REQUIREMENTS:
            raise UnknownName.among("requirement", name, list(REQUIREMENTS))


def longer(found: StepPrediction, requirements: Sequence[str]) -> float:
    """Return the factor by which a predicted step becomes longer under the given requirements: under slow-links, every
    part of it except computing.
    """
    slower = SLOWER if "slow-links" in requirements else 1.0
    return found.utilization + slower * (1 - found.utilization)


def _rank(tried: Found | None) -> tuple[int, float]:
    """Sort key: strategies that reached the target first, then untried ones, then those that missed the target."""
    if tried is None:
        return 1, 0.0
    return (2, 0.0) if tried.seconds is None else (0, tried.seconds)


def _level(left: Sequence[StepPrediction], tried: dict[str, Found]) -> Sequence[StepPrediction]:
    """The strategies that trials do not tell from the fastest, fastest first; without trials, the first alone."""
    fastest = tried.get(left[0].name) if left else None
    if fastest is None or fastest.seconds is None:
        return left[:1]
    most = min(fastest.range[1], SIMPLER * fastest.seconds)
    times = [tried[one.name].seconds if one.name in tried else None for one in left]
    return [one for one, seconds in zip(left, times, strict=True) if seconds and seconds <= most]


def _measured(tried: dict[str, Found], predicted: dict[str, float]) -> dict[str, float]:
    """Speed relative to one worker of the strategies in trials; for those that missed the goal the prediction, but no
    more than the time that they had allows.
    """
    alone = tried[ALONE].seconds if ALONE in tried else None
    if alone is None:
        return {}
    longest = {name: max(trial.seconds for trial in one.trials) for name, one in tried.items()}
    return {
        name: alone / one.seconds if one.seconds else min(predicted[name], alone / longest[name])
        for name, one in tried.items()
        if one.seconds or longest[name] > 0
    }


def value(found: StepPrediction, outlook: Outlook, requirements: tuple[str, ...]) -> float:
    """Return the effective samples per second of a strategy: samples per second divided by the relative number of
    samples needed.

    Under the requirement slow-links, waiting counts as if the links were slower. Under unbalanced, the samples of fast
    workers count less (see `criteria.repeated`).
    """
    rate = found.samples_per_second
    if found.strategy is not None:
        rate /= longer(found, requirements)
    if "unbalanced" in requirements:
        rate /= repeated(found, outlook.site)
    return rate / outlook.relative_samples(found)


def counted(found: StepPrediction) -> bool:
    """Return whether the number of samples that a strategy needs is known: from recorded updates, or from the
    strategy's taxonomy entry.
    """
    return (
        found.updates
        or found.workers == 1
        or (found.strategy is not None and found.strategy.taxonomy_entry is not None)
    )


def unfit(found: StepPrediction, outlook: Outlook, requirements: tuple[str, ...]) -> str | None:
    """Return the reason why a strategy does not meet the requirements or cannot run; None if the strategy meets the
    requirements and can run.
    """
    memory = outlook.site.cluster.memory
    if memory is not None and found.memory > memory:
        return f"a worker's memory of {size(memory)} is not enough"
    if found.strategy is None:
        return "the data are on other machines" if "private" in requirements else None
    traits = found.strategy.traits
    if (found.workers > 1 and not combines(found)) or "ensemble" in traits.results:
        return "every worker trains a separate model"
    if "private" in requirements and traits.samples != "own":
        return LEAVING[traits.samples]
    if "unbalanced" in requirements and not is_central(found.strategy):
        return "the data of all workers must be similar"
    if "unbalanced" in requirements and traits.delivery == "partial":
        return "gradients of slow workers are dropped, so the data of these workers count less"
    if "reproducible" in requirements and not is_synchronous(found.strategy):
        return "the order of updates differs from run to run"
    if "reproducible" in requirements and not is_repeatable(found.strategy):
        return "the order of arrival decides whose gradients are dropped"
    if traits.curvature:
        return "steps follow the curvature, so the number of steps to a target is not known"
    if "elastic" in requirements and (why := worker_losses.unfit_to_lose_workers(found, outlook)) is not None:
        return why
    return DROPS if drops(found) else None


class Recommendation(NamedTuple):
    """What a plan tells the user to do, in sentences."""

    sentences: tuple[str, ...]
    reasons: tuple[str, ...]
    changes: tuple[str, ...]


@dataclass(frozen=True)
class Advice:
    """A recommendation of a strategy, from which its sentences are made."""

    outlook: Outlook
    """The predictions, with the number of samples that trials have measured."""
    left: tuple[StepPrediction, ...]
    """Predictions for the strategies that meet the requirements: the choice, then the others, best first."""
    requirements: tuple[str, ...]
    excluded: tuple[tuple[str, str], ...]
    """Strategies that the requirements rule out: name of the strategy and the reason."""
    speedups: Mapping[str, float]
    """Name of a strategy → predicted speed relative to one worker, under the requirements."""
    limits: frozenset[str]
    """Names of the strategies whose trials ended before their goal, so that `speedups` has only an upper limit."""
    tried: Mapping[str, Found]
    """Name of a strategy → its trials."""
    level: tuple[StepPrediction, ...]
    """The strategies that trials do not tell from the fastest."""
    untried: tuple[str, ...]
    """Names of the strategies that were to be tried, but for which no trial finished."""

    @property
    def choice(self) -> StepPrediction | None:
        """The prediction for the recommended strategy; None if no strategy meets the requirements."""
        return self.left[0] if self.left else None

    @property
    def runner_up(self) -> StepPrediction | None:
        """The prediction for the second-best strategy."""
        return self.left[1] if len(self.left) > 1 else None

    @property
    def ranked(self) -> list[StepPrediction]:
        """The plan's strategies in order of their speed-up, highest first; those with only a limit come last."""
        return sorted(self.outlook.predictions, key=lambda one: (one.name in self.limits, -self.speedups[one.name]))

    def document(self) -> dict[str, Any]:
        """Return the advice as plain data, for JSON."""
        return {
            "choice": None if self.choice is None else self.choice.name,
            "runner_up": None if self.runner_up is None else self.runner_up.name,
            "sentences": list(self.sentences),
            "reasons": list(self.reasons),
            "changes": list(self.changes),
            "excluded": [{"name": name, "why": why} for name, why in self.excluded],
            "requirements": list(self.requirements),
            "untried": list(self.untried),
        }

    @cached_property
    def sentences(self) -> tuple[str, ...]:
        """Sentences of advice to the user: which strategy to use, with which settings, and instead of what."""
        if self.choice is None:
            return self._nothing()
        if self._decided(self.choice):
            said = self._by_trials(self.choice)
        elif self.choice.strategy is None:
            said = [f"Use one worker ({_rate(self.choice)}).", self._instead_of_others(self.choice)]
        else:
            said = [self._by_prediction(self.choice), self._uncompressed(self.choice)]
        return (*filter(None, said), *self._partial(self.choice))

    def _decided(self, choice: StepPrediction) -> bool:
        """Whether trials decided the choice."""
        return choice.name in self.tried and self.tried[choice.name].seconds is not None

    def _trains(self, found: StepPrediction) -> str:
        return as_much(self.speedups[found.name], "fast")

    def _needs(self, found: StepPrediction) -> str:
        """The number of samples that a strategy needs, relative to one worker; a formula's number is assumed."""
        verb = "needs" if found.name in self.outlook.measured else "is assumed to need"
        return f"{verb} {as_much(self.outlook.relative_samples(found))} samples for the same accuracy"

    def _nothing(self) -> tuple[str, ...]:
        """Why no strategy meets the requirements."""
        why, memory, alone = dict(self.excluded), self.outlook.site.cluster.memory, self.outlook.alone
        single, way = f"{alone.name}: {why.pop(alone.name)}", "leave out one --require"
        if memory is not None and alone.memory > memory:
            single = f"{alone.name} needs {size(alone.memory)} and has {size(memory)}"
            way = "plan for machines with more memory"
        others = list(why.values())
        counts = (f"{many(others.count(one), 'strategy', 'strategies')}: {one}" for one in dict.fromkeys(others))
        return f"No strategy meets the requirements: {'; '.join([single, *counts])}.", f"To get advice, {way}."

    def _by_prediction(self, choice: StepPrediction) -> str:
        workers, alone = many(choice.workers, "worker"), dict(self.excluded).get(ALONE)
        more = as_much(choice.samples_per_second / self.outlook.alone.samples_per_second)
        pace = f"it processes {more} samples per second as one worker ({number(choice.samples_per_second)})"
        if alone is None or self.speedups[choice.name] >= 1:
            return (
                f"Use {short(choice.name)} on {workers}. It is predicted to train {self._trains(choice)} as one "
                f"worker: {pace} and {self._needs(choice)}."
            )
        # Samples per second alone would suggest a gain that this strategy does not have.
        return (
            f"One worker is predicted to need only {share(self.speedups[choice.name])} of the time, but is ruled out: "
            f"{alone}. With this requirement, use {short(choice.name)} on {workers}: {pace}, but "
            f"{self._needs(choice)}."
        )

    def _by_trials(self, choice: StepPrediction) -> list[str]:
        own, alone = self.tried[choice.name], self.tried.get(ALONE)
        assert own.best is not None
        assert own.seconds is not None
        use, tried = f"Use {short(choice.name)} with learning rate {own.best.lr:.3g}", "in trials on the job,"
        if choice.strategy is None:
            others = [self.tried[one.name] for one in self.left[1:] if one.name in self.tried]
            times = [one.seconds for one in others if one.seconds is not None]
            best = f"; the best trained {as_much(own.seconds / min(times), 'fast')}" if own.seconds and times else ""
            among = many(len(others), "strategy", "strategies")
            said = f"{use}: {tried} none of {among} was faster by more than a tenth{best}."
        elif alone is None or alone.seconds is None:
            use = f"{use} on {many(choice.workers, 'worker')}"
            said = f"{use}: {tried} it reached the goal first; one worker did not reach the goal."
        else:
            low, high = alone.range[0] / own.range[1], alone.range[1] / own.range[0]
            between = f"{number(low, 2)} to {number(high, 2)}" if math.isfinite(high) else f"at least {number(low, 2)}"
            said = (
                f"{use} on {many(choice.workers, 'worker')}: {tried} it trained "
                f"{as_much(alone.seconds / own.seconds, 'fast')} as one worker at the best learning rate of each "
                f"({between} times over {many(len(own.at_best_rate), 'seed')})."
            )
        equal = [short(one.name) for one in self.level if one is not choice]
        if not equal:
            return [said]
        told = listed([*equal[:SHOWN], *([many(len(equal) - SHOWN, "other")] if len(equal) > SHOWN else [])])
        simplest = f"{short(choice.name)} is the simplest of them"
        return [said, f"Within the ranges of the trials, {told} trained as fast; {simplest}."]

    def _instead_of_others(self, choice: StepPrediction) -> str:
        """Why one worker is recommended, and not the fastest strategy, or the one with the most samples per second."""
        others = [one for one in self.left if one.strategy is not None and combines(one)]
        if not others:
            return "No other strategy meets the requirements."
        if self.outlook.workers == 1:
            return ""
        fastest = max(others, key=lambda one: self.speedups[one.name])
        workers, gain = many(fastest.workers, "worker"), self.speedups[fastest.name]
        if gain > self.speedups[choice.name]:
            told = number(math.floor(100 * gain) / 100, 3)  # never rounded up to the margin
            return (
                f"{short(fastest.name)} on {workers} is predicted to train {told} times as fast as one worker, but "
                f"{uncertain()}."
            )
        most = max(others, key=lambda one: one.samples_per_second)
        ratio = as_much(most.samples_per_second / choice.samples_per_second)
        return (
            f"On {workers} of {self.outlook.site.cluster.name}, {short(most.name)} processes the most samples per "
            f"second, {number(most.samples_per_second)} ({ratio} as one worker); it {self._needs(most)}, so it is "
            f"predicted to train {self._trains(most)} as one worker."
        )

    def _uncompressed(self, choice: StepPrediction) -> str:
        """Why no compression is recommended, if a strategy with compression would be slower."""
        compressed = [one for one in self.left if approximates(one) and not drops(one)]
        if approximates(choice) or not compressed:
            return ""
        best = max(compressed, key=lambda one: self.speedups[one.name])
        ratio = self.speedups[best.name] / self.speedups[choice.name]
        if ratio >= 1:
            return ""
        rate = as_much(best.samples_per_second / choice.samples_per_second)
        return (
            f"Do not compress: {short(best.name)}, the best strategy with compression, processes {rate} samples per "
            f"second as {short(choice.name)}, but is predicted to train {as_much(ratio, 'fast')}."
        )

    def _partial(self, choice: StepPrediction) -> list[str]:
        """Sentences about missing trials, and about the basis of the advice in that case."""
        said = list[str]()
        planned = max(self.left, key=lambda one: preference(one, self.speedups[one.name]))
        if self.untried:
            tried = len(self.tried)
            were = "none was" if not tried else "only 1 was" if tried == 1 else f"only {tried} were"
            rest = ", ".join(map(short, self.untried))
            said.append(
                f"This advice is partial: of {len(self.untried) + tried} strategies {were} tried; not tried: {rest}."
            )
        if self.tried and choice.name not in self.tried:
            said.append(f"No tried strategy reached the target; the plan alone recommends {short(choice.name)}.")
        elif self.untried and planned.name not in self.tried:
            said.append(f"The plan alone would recommend {short(planned.name)}, which was not tried.")
        return said

    @cached_property
    def reasons(self) -> tuple[str, ...]:
        """The reasons for the recommendation, one sentence each."""
        outlook, choice, second, said = self.outlook, self.choice, self.runner_up, list[str]()
        if choice is None:
            return ()
        name, (latency, bandwidth) = short(choice.name), outlook.site.link
        if bandwidth < math.inf:
            said.append(
                f"Sending the model ({size(outlook.task.nbytes)}) over the slowest link takes "
                f"{seconds(outlook.task.nbytes / bandwidth + latency)}; computing a gradient takes "
                f"{seconds(outlook.alone.seconds)} on the fastest worker."
            )
        if choice.strategy is not None:
            said.append(
                f"A step of {name} takes {ranged(choice)}; a worker computes for {share(choice.utilization)} of this "
                f"time and sends {size(choice.sent_bytes)} (from a rehearsal)."
            )
        if departs := departures(choice, outlook.site):
            said.append(
                f"{name} differs from training on one worker: {'; '.join(departs)}. It therefore {self._needs(choice)} "
                "as one worker."
            )
        if second is not None and (not self._decided(choice) or second.name in outlook.measured):
            needs = f" and {self._needs(second)} as one worker" if second.strategy is not None else ""
            said.append(f"The second-best choice is {short(second.name)}: it processes {_rate(second)}{needs}.")
        said += [f"Taken into account: {REQUIREMENTS[one]}." for one in self.requirements]
        if choice.strategy is None:
            return tuple(said)
        if outlook.site.cluster.failures:
            said.append(worker_losses.sentence(choice, outlook))
        row, versions = criteria(choice, outlook.site), outlook.late(choice)
        parts = [f"the learning rate {_RATES[row.learning_rate]}"]
        if versions:
            parts.append(f"updates are {number(versions, 2)} versions late on average")
        parts.append(f"it has {many(row.hyper_parameters, 'additional hyper-parameter')}")
        if row.exposure is not None:
            parts.append(f"all workers wait for {exposed(row.exposure)} of the slowest worker's delay")
        parts.append(f"reproducing a result exactly is {row.reproducible}")
        graded = f"the strategy is {row.technique}: {', '.join(parts)}"
        return (*said, f"By the criteria of table 2 of Langer et al. (2020), {graded}.")

    @cached_property
    def changes(self) -> tuple[str, ...]:
        """Sentences about conditions under which the advice would change, and the command that measures both; none
        after trials.
        """
        choice, second = self.choice, self.runner_up
        if choice is None or second is None or self.tried:
            return ()
        said, name, outlook = list[str](), short(second.name), self.outlook
        ahead = preference(second, second.samples_per_second) / preference(choice, choice.samples_per_second)
        behind = preference(choice, self.speedups[choice.name]) / (preference(second, self.speedups[second.name]) or 1)
        if outlook.relative_samples(second) > outlook.relative_samples(choice) and ahead > 1.005:
            more = as_much(second.samples_per_second / choice.samples_per_second)
            said.append(
                "if staleness, approximation and separate models did not slow down the progress of this job, "
                f"{name} would be recommended, because it processes {more} samples per second"
            )
        elif self.speedups[second.name] > 0 and behind >= 1:
            much = "less than 0.1 % faster" if behind < 1.001 else f"{share(behind - 1)} faster"
            much = f"{number(behind, 2)} times as fast" if behind >= 2 else much
            said.append(f"if {name} were {much}, it would be recommended")
        if outlook.task.job is not None:
            tried = [short(one.name) for one in (choice, second)]
            options = [shlex.quote(short(one.name)) for one in (choice, second) if one.strategy is not None]
            said.append(
                f"to measure the time to target of {' and '.join(tried)}, repeat the command with --simulate "
                f"{' '.join(f'-s {option}' for option in options)}"
            )
        return tuple(said)


_RATES = {
    "higher": "may grow with the number of workers",
    "likely": "is near one worker's",
    "lower": "must be lower",
}


def _rate(found: StepPrediction) -> str:
    return f"{number(found.samples_per_second)} samples per second"


def uncertain() -> str:
    """Text of the reason why one worker is recommended although more workers are predicted to be a little faster."""
    return (
        f"predictions err by up to {share(MARGIN - 1)}, so several workers are recommended only if they are "
        f"predicted to train at least {MARGIN:g} times as fast"
    )
