"""Finds a compute model that describes measured durations of gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError
from flockstep.simulation.compute import ComputeModel, ConstantTime, Empirical, Lognormal

STEADY = 1e-3
"""Standard deviation, as a share of the mean, below which durations count as constant."""
NEAR = 1.63
"""Largest distance, times √n, at which n durations count as lognormal: the 1 % bound of the Kolmogorov-Smirnov test.
`SLACK` is added to the distance, because no model fits exactly.
"""
SLACK = 0.05
QUANTILES = 21


@dataclass(frozen=True)
class Fit:
    """A compute model that was fitted to durations, and the reason for its choice."""

    law: ComputeModel
    why: str


def fit_law(seconds: Sequence[float] | FlatArray) -> Fit:
    """Fit a compute model to durations: constant; lognormal with the measured mean; or, if neither fits, the measured
    quantiles.

    Raises:
        ConfigurationError: there are fewer than two durations, or a duration is not positive.
    """
    times = np.sort(np.asarray(seconds, dtype=np.float64))
    if len(times) < 2 or not times[0] > 0 or not math.isfinite(times[-1]):
        raise ConfigurationError(
            f"a compute model needs at least two durations > 0, got {len(times)} durations, beginning with "
            f"{times[:1]}; measure more steps"
        )
    mean = _short(float(times.mean()))
    if times.std() < STEADY * times.mean():
        return Fit(
            ConstantTime(mean),
            f"gradient times are treated as constant: the standard deviation of {len(times)} durations is below "
            f"{STEADY:.1%} of their mean",
        )
    logs = np.log(times)
    law = Lognormal(mean, _short(float(logs.std())))
    distance = _distance(logs, math.log(law.mean) - law.sigma**2 / 2, law.sigma)
    limit = NEAR / math.sqrt(len(times)) + SLACK
    apart = f"the Kolmogorov-Smirnov distance of {len(times)} durations from a lognormal distribution is {distance:.2f}"
    if distance <= limit:
        return Fit(law, f"gradient times are treated as lognormal: {apart}, within the limit of {limit:.2f}")
    return Fit(
        Empirical(_quantiles(times)),
        f"gradient times are described by quantiles, because no named distribution fits: {apart}, above the limit of "
        f"{limit:.2f}",
    )


def _quantiles(times: FlatArray) -> tuple[float, ...]:
    """Equally probable quantiles.

    The last one is chosen to reproduce the mean, because it says little about a long tail.
    """
    at = np.quantile(times, np.linspace(0, 1, QUANTILES))
    last = 2 * ((QUANTILES - 1) * times.mean() - at[1:-1].sum()) - at[0]
    if last >= at[-2]:
        at[-1] = last
    else:
        at *= times.mean() / Empirical(tuple(at.tolist())).mean
    return tuple(_short(one) for one in at.tolist())


def _distance(logs: FlatArray, mean: float, sigma: float) -> float:
    """Kolmogorov-Smirnov distance of sorted logarithms from a normal distribution."""
    share = np.array([0.5 * math.erfc((mean - one) / (sigma * math.sqrt(2))) for one in logs])
    steps = np.arange(len(logs) + 1) / len(logs)
    return float(max((share - steps[:-1]).max(), (steps[1:] - share).max()))


def _short(value: float) -> float:
    """Round to six significant digits, since more are not known."""
    return float(f"{value:.6g}")
