"""Computes, without a simulation, the mean duration of a compute model's gradients and the mean delay of the slowest
worker.
"""

from __future__ import annotations

import itertools
import math
import statistics
from functools import lru_cache

import numpy as np

from flockstep.simulation.compute import (
    ComputeModel,
    ConstantTime,
    Empirical,
    Exponential,
    Lognormal,
    Normal,
    Pareto,
    SharedCores,
    SlowSpells,
    Speeds,
)

DRAWS = 4096
"""Number of random draws, over all workers, for a model whose means have no closed form."""
ROUNDS = 100
"""Minimum number of random draws for each worker."""


def mean_of(law: ComputeModel) -> float:
    """Return the mean seconds of a gradient over all workers, without the time spent waiting for a core."""
    if isinstance(law, SharedCores):
        return mean_of(law.base)
    if isinstance(law, Speeds):
        return mean_of(law.base) * statistics.fmean(law.factors)
    if isinstance(law, SlowSpells):
        often = law.probability * law.length
        slow = often / (often + 1 - law.probability)
        return mean_of(law.base) * (1 - slow + slow * law.factor)
    if isinstance(law, Normal):
        return _truncated(law.mean, law.deviation)
    if isinstance(law, (ConstantTime, Exponential, Lognormal, Pareto, Empirical)):
        return law.mean
    return statistics.fmean(itertools.islice(law.stream(0, 0), DRAWS))


def _truncated(mean: float, deviation: float) -> float:
    """Mean of a normal variable that is truncated at zero: m + σ φ(m/σ) / Φ(m/σ)."""
    if deviation == 0:
        return mean
    ratio = mean / deviation
    density = math.exp(-(ratio**2) / 2) / math.sqrt(2 * math.pi)
    return mean + deviation * density / (0.5 * math.erfc(-ratio / math.sqrt(2)))


def late_of(law: ComputeModel, workers: int) -> float:
    """Return the mean seconds by which the slowest worker's gradient in a step exceeds the mean over the workers."""
    return drawn(law, workers, max(ROUNDS, DRAWS // workers))[1]


@lru_cache(maxsize=512)
def drawn(law: ComputeModel, workers: int, rounds: int, first: int = 0) -> tuple[float, float]:
    """Return the mean seconds of a gradient, and the mean delay of the slowest worker in a step, from random draws with
    seed 0.

    Time spent waiting for a core is not included.
    """
    if isinstance(law, SharedCores):
        return drawn(law.base, workers, rounds, first)
    times = np.array([list(itertools.islice(law.stream(0, rank), first, rounds)) for rank in range(workers)])
    return float(times.mean()), float((times.max(0) - times.mean(0)).mean())
