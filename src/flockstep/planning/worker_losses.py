"""Predicts the number of workers that fail during a run, and the probability that a strategy does not survive these
failures.
"""

from __future__ import annotations

import math

import numpy as np

from flockstep.planning.plan import Outlook
from flockstep.planning.step_prediction import StepPrediction
from flockstep.planning.words import many
from flockstep.report import formatting

HOUR, DAY = 3600.0, 86400.0
"""Number of seconds in an hour and in a day. A run is assumed to last a day if neither the user nor the job specifies
its length.
"""
SELDOM, NEVER = 0.01, 1e-9
"""Probabilities below which a risk is stated as one run in many (SELDOM), or as no risk (NEVER)."""
RISK = 0.05
"""Largest accepted probability that a run ends early, on a cluster whose workers join and leave."""


def length(found: StepPrediction, outlook: Outlook) -> float:
    """Return the predicted duration of a run in seconds: given by the user, or the job's steps times their predicted
    duration.
    """
    if outlook.length is not None:
        return outlook.length
    return DAY if outlook.steps is None else outlook.steps * found.seconds


def deaths(found: StepPrediction, outlook: Outlook) -> list[float]:
    """Return the probabilities that k workers die during the run, for k = 0 … n.

    Each machine fails at most once, at its failure rate, and all its workers die with it; no worker joins to replace a
    dead worker.
    """
    lasts, odds = length(found, outlook), np.ones(1)
    for group, size in outlook.site.cluster.placed(found.workers):
        dies = -math.expm1(-lasts * group.failures)
        machine = np.zeros(size + 1)
        machine[0], machine[size] = 1 - dies, dies
        odds = np.convolve(odds, machine)
    return [float(one) for one in odds]


def risk(found: StepPrediction, outlook: Outlook) -> float:
    """Return the probability that more workers die during the run than the strategy survives; servers are assumed not
    to fail.
    """
    return min(1.0, math.fsum(deaths(found, outlook)[_survived(found) + 1 :]))


def unfit_to_lose_workers(found: StepPrediction, outlook: Outlook) -> str | None:
    """Return the reason why a strategy is unsuitable for workers that join and leave; None if the strategy is suitable
    for such workers.
    """
    survived = _survived(found)
    ends = f"a run survives the loss of {many(survived, 'worker')}" if survived else "a run stops when a worker is lost"
    if not outlook.site.cluster.failures:
        if survived == found.workers - 1:
            return None
        return f"{ends}, and {outlook.site.cluster.name} does not say how often machines fail" if survived else ends
    probable = risk(found, outlook)
    if probable <= RISK:
        return None
    lasts = _lasting(length(found, outlook))
    return f"{ends}: {formatting.share(probable)} of runs of {lasts} end early"


def sentence(found: StepPrediction, outlook: Outlook) -> str:
    """Return a sentence about the number of workers that the run is predicted to lose, and about the consequence."""
    survived, odds, lasts = _survived(found), deaths(found, outlook), ""
    ends = f"survives the loss of {many(survived, 'worker')}" if survived else "does not survive the loss of a worker"
    if outlook.length is None:
        known = "assumed" if outlook.steps is None else f"{outlook.steps:,} steps"
        lasts = f" ({known}; change it with --hours)"
    mean, workers = math.fsum(count * one for count, one in enumerate(odds)), many(len(odds) - 1, "worker")
    if mean >= 1:
        lost = f"{formatting.number(mean, 2)} of {workers} are expected to fail"
    else:
        any_lost = _of_runs(math.fsum(odds[1:]), "loses", "lose")
        lost = f"fewer than one of {workers} is expected to fail ({any_lost} a worker)"
    return (
        f"In a run of {_lasting(length(found, outlook))}{lasts}, {lost}, and no new worker can join; {found.name} "
        f"{ends}, so {_of_runs(risk(found, outlook))} early."
    )


def _of_runs(probability: float, ends: str = "ends", end: str = "end") -> str:
    """Text of the share of runs in which something happens: "8 % of runs end", "one run in 1,000 ends"."""
    if probability >= SELDOM:
        return f"{formatting.share(probability)} of runs {end}"
    if probability > NEVER:
        return f"one run in {float(f'{1 / probability:.0e}'):,.0f} {ends}"
    return f"hardly any run {ends}"


def _survived(found: StepPrediction) -> int:
    return 0 if found.strategy is None else found.strategy.traits.deaths(found.workers)


def _lasting(seconds: float) -> str:
    return f"{formatting.number(seconds / HOUR)} h" if seconds >= HOUR else formatting.seconds(seconds)
