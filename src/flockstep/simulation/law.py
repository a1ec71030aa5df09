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


def mean_of(law: ComputeModel, rank: int | None = None) -> float:
    """Return the mean seconds of a gradient of worker `rank`, or over all workers, without the time spent waiting for a
    core.
    """
    if isinstance(law, SharedCores):
        return mean_of(law.base, rank)
    if isinstance(law, Speeds):
        factors = law.factors
        return mean_of(law.base, rank) * (statistics.fmean(factors) if rank is None else factors[rank % len(factors)])
    if isinstance(law, SlowSpells):
        often = law.probability * law.length
        slow = often / (often + 1 - law.probability)
        return mean_of(law.base, rank) * (1 - slow + slow * law.factor)
    if isinstance(law, Normal):
        return _truncated(law.mean, law.deviation)
    if isinstance(law, (ConstantTime, Exponential, Lognormal, Pareto, Empirical)):
        return law.mean
    ranks = range(law.ranks) if rank is None else (rank,)
    return statistics.fmean(statistics.fmean(itertools.islice(law.stream(0, one), DRAWS)) for one in ranks)


def _truncated(mean: float, deviation: float) -> float:
    """Mean of a normal variable that is truncated at zero: m + σ φ(m/σ) / Φ(m/σ)."""
    if deviation == 0:
        return mean
    ratio = mean / deviation
    density = math.exp(-(ratio**2) / 2) / math.sqrt(2 * math.pi)
    return mean + deviation * density / (0.5 * math.erfc(-ratio / math.sqrt(2)))


@lru_cache(maxsize=512)
def late_of(law: ComputeModel, workers: int, cycle: int = 1) -> float:
    """Return the mean seconds of a step by which the slowest of `workers` workers is later than their mean, if workers
    wait for each other after every `cycle` steps.
    """
    if isinstance(law, SharedCores):
        return late_of(law.base, workers, cycle)
    cycles = math.ceil(max(ROUNDS, DRAWS // workers) / cycle) + ROUNDS // 4
    times = np.array([list(itertools.islice(law.stream(0, rank), cycles * cycle)) for rank in range(workers)])
    sums = times.reshape(workers, cycles, cycle).sum(2)
    return float((sums.max(0) - sums.mean(0)).mean()) / cycle
