"""Claim: replicas that average with their neighbors on a ring approach each other at a known rate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flockstep.testing.strategies import bowl_job, run_strategy
from flockstep.topologies.facts import facts
from flockstep.topologies.ring import RingGraph
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict

PUBLISHED = {4: 0.333, 8: 0.8047, 16: 0.9493, 32: 0.9872}
"""Number of workers n → published factor ρ = 1/3 + 2/3 cos(2π / n), by which the disagreement of the replicas shrinks
per step.
"""
WINDOWS = {4: (2, 12), 8: (25, 45), 16: (60, 90), 32: (250, 300)}
"""Number of workers → first and last step of the measurement: faster modes have decayed, and rounding has no effect
yet.
"""
SEEDS = 5
DIMENSION = 4


@dataclass(frozen=True)
class ConsensusRate(Claim):
    """Claim: without gradients, the disagreement of D-PSGD's replicas on a ring shrinks by a factor ρ per step."""

    statement = (
        "With a learning rate of zero, the disagreement on a ring with weights 1/3 shrinks in each step by a factor "
        "equal to the second eigenvalue of the mixing matrix"
    )
    source = "Lian et al. 2017, assumption 1 and theorem 1 (rho of W); eigenvalues of a circulant matrix"
    setting = (
        f"dpsgd(ring), learning rate 0, {', '.join(map(str, PUBLISHED))} workers with random initial parameters from "
        f"{SEEDS} seeds, float64, virtual time"
    )
    tolerance = (
        "slope of the logarithm of the disagreement over steps, median of the seeds, within 1 % of log rho; the "
        "bound rho^t holds for every seed"
    )
    quick = True

    def check(self, say: Say) -> Verdict:
        """Measure the factor per step after many steps, and check the bound ρ^t at the first and last measured step."""
        rows: list[ClaimRow] = []
        figures: dict[str, float] = {}
        for n, expected in PUBLISHED.items():
            say(f"{n} workers")
            begin, end = WINDOWS[n]
            starts = [np.random.default_rng(seed).normal(size=(n, DIMENSION)) for seed in range(SEEDS)]
            rho = 1 - facts(RingGraph(), n).spectral_gap
            early, late = (spreads(n, steps, starts) for steps in (begin, end))
            rates = (late / early) ** (1 / (end - begin))
            rate = float(np.median(rates))
            rows.append(
                ClaimRow(
                    f"factor by which the disagreement shrinks per step, {n} workers",
                    expected,
                    rate,
                    as_steep(rate, expected),
                )
            )
            first = np.array([spread(start) for start in starts])
            excess = max(float(np.max(s / (rho**t * first))) for s, t in ((early, begin), (late, end)))
            rows.append(
                ClaimRow(
                    f"largest ratio of the disagreement after t steps to rho^t × initial disagreement, {n} workers",
                    "<= 1",
                    excess,
                    excess <= 1 + 1e-9,
                )
            )
            figures |= {f"least rate, {n}": float(rates.min()), f"largest rate, {n}": float(rates.max())}
        return Verdict(tuple(rows), figures=figures)


def as_steep(rate: float, expected: float) -> bool:
    """Whether the logarithms of two rates differ by at most 1 %; the rates themselves are too close to 1 to be
    compared.
    """
    return bool(abs(np.log(rate) / np.log(expected) - 1) <= 0.01)


def spread(replicas: np.ndarray) -> float:
    """Frobenius norm of the difference between the replicas, of shape (n, K), and their mean."""
    return float(np.linalg.norm(replicas - replicas.mean(0)))


def spreads(n: int, steps: int, starts: list[np.ndarray]) -> np.ndarray:
    """Return, for each of `starts`, the Frobenius norm of the replicas' distances from their mean after `steps` steps.

    `starts` are arrays of initial parameters; one run simulates all of them side by side.
    """
    job = bowl_job("sgd(lr=0)", dimension=DIMENSION * len(starts))
    run = run_strategy("dpsgd(ring)", n, steps, job=job, replicas=np.hstack(starts), compute="constant(1)")
    return np.array([spread(part) for part in np.split(run.replicas, len(starts), axis=1)])
