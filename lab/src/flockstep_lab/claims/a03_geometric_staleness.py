"""Claim: the staleness of asynchronous SGD is geometrically distributed if compute times are exponential."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flockstep_lab.claims.base import Claim, Say, Verdict, bounded, near
from flockstep_lab.claims.update_trace import timed

WORKERS = 8
BINS = 41
"""Number of bins of the chi-squared test: one for each staleness from 0 to 39, and one bin for all larger values,
which gives 40 degrees of freedom.
"""


@dataclass(frozen=True)
class GeometricStaleness(Claim):
    """Claim: with exponential compute times, staleness follows a geometric distribution."""

    steps: int = 15_000
    statement = (
        "If gradient times are memoryless, the staleness of asynchronous SGD with P workers is geometric: P(k) = "
        "(1/P) (1 - 1/P)^k"
    )
    source = "Mitliagkas, Zhang, Hadjis & Re 2016 (queueing model with exponential work times)"
    setting = "parameter server, 8 workers, exponential gradient times, virtual time, messages that take no time"
    tolerance = "chi-squared test with 40 degrees of freedom: p > 0.01; mean staleness within 1 % of 7"

    def check(self, say: Say) -> Verdict:
        trace = timed("ps(asynchronous)", WORKERS, self.steps, "exponential(1)")[0].until_first_end(self.steps)
        settled = slice(5 * WORKERS, None)
        staleness, rank = trace.staleness[settled], trace.rank[settled]
        mean = float(staleness.mean())
        p_all, p_one = fit(staleness), fit(staleness[rank == 0])
        say(f"{len(staleness)} gradients: mean staleness {mean:.4f}, p-value {p_all:.3f}")
        rows = (
            near("mean staleness", WORKERS - 1, mean, 0.01),
            bounded("p-value of the chi-squared test on the gradients of all workers", "> 0.01", p_all),
            bounded(
                "p-value of the chi-squared test on the gradients of one worker, which are independent", "> 0.01", p_one
            ),
        )
        normal = timed("ps(asynchronous)", WORKERS, self.steps // 10, "normal(1, cv=0.5)")[0].staleness
        p_normal = fit(normal[settled])
        contrast = bounded(
            "control: p-value with normal gradient times (coefficient of variation 0.5)", "< 1e-6", p_normal
        )
        shares = np.bincount(staleness, minlength=3)[:3] / len(staleness)
        return Verdict((*rows, contrast), figures={f"share of staleness {k}": float(s) for k, s in enumerate(shares)})


def fit(staleness: npt.NDArray[np.int64]) -> float:
    """Return the p-value of the chi-squared test of `staleness` against the geometric distribution."""
    expected = (1 / WORKERS) * (1 - 1 / WORKERS) ** np.arange(BINS - 1)
    expected = np.append(expected, 1 - expected.sum()) * len(staleness)
    counts = np.bincount(np.minimum(staleness, BINS - 1), minlength=BINS)
    return chi_squared_above(float(((counts - expected) ** 2 / expected).sum()), BINS - 1)


def chi_squared_above(x: float, freedom: int) -> float:
    """Return P(chi-squared > x) for an even number n of degrees of freedom: exp(-x/2) Σ (x/2)^i / i!, summed over i <
    n/2.
    """
    half, term = x / 2, math.exp(-x / 2)
    total = term
    for i in range(1, freedom // 2):
        term *= half / i
        total += term
    return total
