"""How many workers are lost while a run lasts, and how probable it is that a strategy does not survive as many."""

from __future__ import annotations

import math

import numpy as np

from flockstep.planning.plan import Outlook
from flockstep.planning.prospect import Prospect
from flockstep.planning.words import many
from flockstep.report import words

HOUR, DAY = 3600.0, 86400.0
"""Seconds; a run is taken to last a day where neither the user nor a job with data says how long."""
RISK = 0.05
"""Probability that a run ends early above which a strategy is ruled out where workers come and go."""


def length(found: Prospect, outlook: Outlook) -> float:
    """Seconds that a run is predicted to last: as the user says, or the job's steps, each as long as is predicted."""
    if outlook.length is not None:
        return outlook.length
    return DAY if outlook.steps is None else outlook.steps * found.seconds


def deaths(found: Prospect, outlook: Outlook) -> list[float]:
    """P(k of the workers die while the run lasts), for k = 0 … n.

    A machine fails at its rate, takes all its workers along, and does so once: no worker joins a run in the place of a
    dead one.
    """
    lasts, odds = length(found, outlook), np.ones(1)
    for group, size in outlook.site.cluster.placed(found.workers):
        dies = -math.expm1(-lasts * group.failures)
        machine = np.zeros(size + 1)
        machine[0], machine[size] = 1 - dies, dies
        odds = np.convolve(odds, machine)
    return [float(one) for one in odds]


def risk(found: Prospect, outlook: Outlook) -> float:
    """Probability that more workers die during the run than the strategy survives; servers are taken not to fail."""
    return min(1.0, math.fsum(deaths(found, outlook)[_survived(found) + 1 :]))


def unfit_to_lose_workers(found: Prospect, outlook: Outlook) -> str | None:
    """Why a strategy does not do where workers come and go; None if it does."""
    survived = _survived(found)
    ends = f"survives {many(survived, 'death')} (RSOI)" if survived else "stops when a worker is gone (RSOI)"
    if not outlook.site.cluster.failures:
        if survived == found.workers - 1:
            return None
        return f"{ends}, and {outlook.site.cluster.name} does not say how often machines fail" if survived else ends
    probable = risk(found, outlook)
    if probable <= RISK:
        return None
    lasts = _lasting(length(found, outlook))
    return f"{ends}: within {lasts} it ends early with probability {words.share(probable)}"


def sentence(found: Prospect, outlook: Outlook) -> str:
    """How many workers the run is predicted to lose, and what becomes of it."""
    lost = math.fsum(count * odds for count, odds in enumerate(deaths(found, outlook)))
    survived = _survived(found)
    ends = f"survives {many(survived, 'death')}" if survived else "survives no death of a worker"
    return (
        f"Of {found.workers:,} workers {words.number(lost, 2)} are predicted to die in the "
        f"{_lasting(length(found, outlook))} that the run is taken to last{_why(outlook)}, and none can "
        f"join in their place; {found.name} {ends}, "
        f"so that the run ends early with probability {words.share(risk(found, outlook))}."
    )


def _survived(found: Prospect) -> int:
    return 0 if found.strategy is None else found.strategy.traits.deaths(found.workers)


def _why(outlook: Outlook) -> str:
    if outlook.length is not None:
        return ""
    return " (--hours says otherwise)" if outlook.steps is None else f" ({outlook.steps:,} steps; --hours changes that)"


def _lasting(seconds: float) -> str:
    return f"{words.number(seconds / HOUR)} h" if seconds >= HOUR else words.seconds(seconds)
