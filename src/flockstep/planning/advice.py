"""Advice on the choice of a strategy, from Table 2 of Langer et al. (2020), the plan's figures and the user's
requirements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flockstep.errors import UnknownName
from flockstep.planning import advice_text as say
from flockstep.planning.criteria import count, drops, is_central, is_repeatable, is_synchronous, preference, repeated
from flockstep.planning.plan import Outlook, combines
from flockstep.planning.plan_text import short
from flockstep.planning.search import Found, measured
from flockstep.planning.step_prediction import ALONE, StepPrediction
from flockstep.planning.worker_losses import unfit_to_lose_workers
from flockstep.report import formatting

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


@dataclass(frozen=True)
class Advice:
    """A recommendation of a strategy, as sentences with reasons."""

    choice: StepPrediction | None
    """Name of the recommended strategy; None if no strategy meets the requirements."""
    runner_up: StepPrediction | None
    sentences: tuple[str, ...]
    """Sentences of advice to the user."""
    reasons: tuple[str, ...]
    changes: tuple[str, ...]
    """Sentences about conditions under which the advice would change."""
    excluded: tuple[tuple[str, str], ...]
    """Strategies that the requirements rule out: name of the strategy and the reason."""
    requirements: tuple[str, ...]
    speedups: dict[str, float] = field(default_factory=dict)
    """Name of a strategy → predicted speed relative to one worker, by which strategies are ordered."""
    untried: tuple[str, ...] = ()
    """Names of the strategies that were to be tried, but for which no trial finished."""

    def ranked(self, outlook: Outlook) -> list[StepPrediction]:
        """The plan's strategies in order of their predicted speed-up, highest first."""
        return sorted(outlook.predictions, key=lambda one: -self.speedups[one.name])

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
    speedups |= _measured(tried, speedups)
    if not left:
        sentences = say.nothing(outlook, excluded)
        return Advice(None, None, sentences, (), (), tuple(excluded), requirements, speedups)
    left.sort(key=lambda one: (*_rank(tried.get(one.name)), -preference(one, speedups[one.name])))
    level = _level(left, tried)
    choice = min(level, key=lambda one: _complexity(one, outlook))
    left.remove(choice)
    left.insert(0, choice)
    meanings = [REQUIREMENTS[one] for one in requirements]
    case = say.Case(outlook, left, speedups, meanings, dict(excluded).get(ALONE), tried, level)
    untried = tuple(name for name in candidates if name not in tried and name not in refused)
    return Advice(
        choice,
        case.second,
        (*say.recommendation(case, choice), *_partial(case, tried, untried)),
        say.reasons(case, choice),
        () if tried else say.changes(case, choice),
        tuple(excluded),
        requirements,
        speedups,
        untried,
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


def slower(requirements: tuple[str, ...]) -> float:
    """Return the factor by which every part of a step except computing is assumed to be longer under the given
    requirements.
    """
    return SLOWER if "slow-links" in requirements else 1.0


def waiting(share: float, slower: float) -> float:
    """Return the factor by which a step becomes longer if computing, which is `share` of the step, takes as long as
    before and the rest takes `slower` times as long.
    """
    return share + slower * (1 - share)


def _rank(tried: Found | None) -> tuple[int, float]:
    """Sort key: strategies that reached the target first, then untried ones, then those that missed the target."""
    if tried is None:
        return 1, 0.0
    return (2, 0.0) if tried.seconds is None else (0, tried.seconds)


def _partial(case: say.Case, tried: dict[str, Found], untried: tuple[str, ...]) -> tuple[str, ...]:
    """Sentences about missing trials, and about the basis of the advice in that case."""
    said = list[str]()
    choice, planned = case.left[0], max(case.left, key=case.preference)
    if untried:
        were = "none was" if not tried else "only 1 was" if len(tried) == 1 else f"only {len(tried)} were"
        rest = ", ".join(map(short, untried))
        said.append(
            f"This advice is partial: of {len(untried) + len(tried)} strategies {were} tried; not tried: {rest}."
        )
    if tried and choice.name not in tried:
        said.append(f"No tried strategy reached the target; the plan alone recommends {short(choice.name)}.")
    elif untried and planned.name not in tried:
        said.append(f"The plan alone would recommend {short(planned.name)}, which was not tried.")
    return tuple(said)


def _level(left: Sequence[StepPrediction], tried: dict[str, Found]) -> Sequence[StepPrediction]:
    """The strategies that trials do not tell from the fastest, fastest first; without trials, the first alone."""
    fastest = tried.get(left[0].name)
    if fastest is None or fastest.seconds is None:
        return left[:1]
    most = min(fastest.range[1], SIMPLER * fastest.seconds)
    times = [tried[one.name].seconds if one.name in tried else None for one in left]
    return [one for one, seconds in zip(left, times, strict=True) if seconds and seconds <= most]


def _complexity(found: StepPrediction, outlook: Outlook) -> tuple[int, int]:
    """Sort key: one worker, then the fewest hyper-parameters, then the fewest differences from one worker."""
    return 0 if found.strategy is None else 1 + count(found.strategy), len(outlook.departures(found))


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
        rate /= waiting(found.utilization, slower(requirements))
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
        return f"a worker's memory of {formatting.size(memory)} is not enough"
    if found.strategy is None:
        return "the data are on other machines" if "private" in requirements else None
    cell, traits = found.strategy.taxonomy_entry, found.strategy.traits
    if (found.workers > 1 and not combines(found)) or "ensemble" in traits.results:
        return "every worker trains a separate model"
    if "private" in requirements and traits.samples != "own":
        return LEAVING[traits.samples]
    if "unbalanced" in requirements and not is_central(cell):
        return "the data of all workers must be similar"
    if "unbalanced" in requirements and traits.delivery == "partial":
        return "gradients of slow workers are dropped, so the data of these workers count less"
    if "reproducible" in requirements and not is_synchronous(cell, traits):
        return "the order of updates differs from run to run"
    if "reproducible" in requirements and not is_repeatable(cell, traits):
        return "the order of arrival decides whose gradients are dropped"
    if traits.curvature:
        return "steps follow the curvature, so the number of steps to a target is not known"
    if "elastic" in requirements and (why := unfit_to_lose_workers(found, outlook)) is not None:
        return why
    return DROPS if drops(found) else None
