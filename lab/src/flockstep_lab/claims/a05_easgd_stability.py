"""Claim: elastic averaging is stable up to a largest elastic rate, which follows from a formula."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.nodes import Worker
from flockstep.simulation.compute import ConstantTime
from flockstep.strategies.elastic_averaging import ElasticAveraging
from flockstep.testing.strategies import bowl_job, run_strategy
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict, bounded

PUBLISHED = {0.1: 0.974, 0.5: 0.857, 1.0: 0.667, 1.5: 0.400, 1.9: 0.095}
"""Learning rate η → largest stable α, computed from the formula to three digits."""
WORKERS = (1, 3, 8)
OPTIMUM = 1.0
FACTOR = 20
"""Factor by which the distance from the optimum must shrink or grow for a run to count as converged or diverged."""


@dataclass(frozen=True)
class InTurn(ConstantTime):
    """Constant compute times; worker r starts r / 16 of a gradient's time late, so that workers exchange one after
    another.
    """

    def stream(self, seed: int, rank: int) -> Iterator[float]:
        yield self.mean * (1 + rank / 16)
        yield from repeat(self.mean)


@dataclass(frozen=True)
class Paced(ElasticAveraging):
    """Elastic averaging that also accepts unstable elastic rates α > 1.

    Each worker's first gradient is discarded: it only shifts the worker's start.
    """

    def __post_init__(self) -> None:
        """Accept any elastic rate α, also one outside of the range that elastic averaging requires."""

    async def worker(self, me: Worker) -> None:
        """Compute one gradient, so that workers do not all exchange at the same time, then run elastic averaging."""
        await me.gradient()
        await super().worker(me)


@dataclass(frozen=True)
class EasgdStability(Claim):
    """Claim: asynchronous elastic averaging is stable up to the published elastic rate."""

    statement = (
        "Asynchronous EASGD with workers taking turns on the quadratic w²/2 is stable if and only if 0 <= eta <= 2 "
        "and 0 <= alpha <= (4 - 2 eta) / (4 - eta), for any number of workers"
    )
    source = "Zhang, Choromanska & LeCun 2015, section 3.2, theorem 1"
    setting = (
        "the strategy easgd(1, alpha, paper) in virtual time, with messages that take no time, with 1, 3 and 8 "
        "workers, float64 and no noise: the matrix of one round, computed from runs that start at each unit vector, "
        "and long runs"
    )
    tolerance = (
        "the alpha at which the spectral radius of a round crosses 1 is within 0.003 of the formula; runs at 0.95 "
        "times the formula's alpha converge, runs at 1.05 times the formula's alpha diverge"
    )

    def check(self, say: Say) -> Verdict:
        """Find the stability boundary by bisection, then run with rates on both sides of the boundary."""
        rows = []
        for eta, bound in PUBLISHED.items():
            found = [boundary(n, eta) for n in WORKERS]
            worst = max(found, key=lambda alpha: abs(alpha - bound))
            say(f"eta {eta}: " + ", ".join(f"{n} workers {alpha:.4f}" for n, alpha in zip(WORKERS, found, strict=True)))
            what = (
                f"largest stable alpha at eta {eta}: of the values with {', '.join(map(str, WORKERS))} workers, the "
                "one farthest from the formula"
            )
            rows.append(ClaimRow(what, bound, worst, abs(worst - bound) <= 0.003))
        exact = {eta: (4 - 2 * eta) / (4 - eta) for eta in PUBLISHED}
        below = max(change(n, eta, 0.95 * alpha) for eta, alpha in exact.items() for n in WORKERS)
        above = min(change(n, eta, 1.05 * alpha) for eta, alpha in exact.items() for n in WORKERS)
        rows += [
            ClaimRow(
                "largest ratio of the final to the initial distance from the optimum, at 0.95 times the largest "
                "stable alpha",
                f"< 1/{FACTOR}",
                below,
                below < 1 / FACTOR,
            ),
            bounded(
                "smallest ratio of the final to the initial distance from the optimum, at 1.05 times the largest "
                "stable alpha",
                f"> {FACTOR}",
                above,
            ),
        ]
        reason = (
            "The bound holds for the order of the paper, which computes the gradient at the point before the "
            "elastic move; in the order of the survey, which flockstep uses by default, every alpha up to 1/2 is "
            "stable for eta < 2. With 8 workers slightly larger values than the bound are stable: the bound is "
            "sufficient for any number of workers, and exact for 1 and 3"
        )
        return Verdict(tuple(rows), reason)


def boundary(workers: int, eta: float) -> float:
    """Return the elastic rate α at which the spectral radius of one round crosses 1, accurate to 0.0005."""
    low, high = 0.0, 1.2
    while high - low > 0.0005:
        alpha = (low + high) / 2
        stable = radius(one_round(workers, eta, alpha)) <= 1
        low, high = (alpha, high) if stable else (low, alpha)
    return (low + high) / 2


def one_round(workers: int, eta: float, alpha: float) -> FlatArray:
    """Return the matrix, of shape (n + 1, n + 1), by which one round multiplies the distances of n replicas and the
    center from the optimum. The matrix is measured in runs of one step.
    """
    single = [after(workers, eta, alpha, 1, OPTIMUM, OPTIMUM + unit) for unit in np.eye(workers)]
    together = after(workers, eta, alpha, 1, OPTIMUM + 1, None)
    return np.column_stack([*single, together - np.sum(single, axis=0)])


def radius(matrix: FlatArray) -> float:
    """Return the spectral radius of a matrix, the largest absolute value of its eigenvalues."""
    return float(np.abs(np.linalg.eigvals(matrix)).max())


def change(workers: int, eta: float, alpha: float) -> float:
    """Return the largest distance from the optimum after many rounds, divided by the distance at the start."""
    rate = abs(np.log(radius(one_round(workers, eta, alpha))))
    rounds = int(np.ceil(4 * np.log(FACTOR) / rate))
    return float(np.abs(after(workers, eta, alpha, rounds, OPTIMUM + 1, None)).max())


def after(workers: int, eta: float, alpha: float, rounds: int, start: float, replicas: FlatArray | None) -> FlatArray:
    """Return the distances of all n replicas and of the center from the optimum at the end of a run, of shape (n + 1,).

    `replicas`, if given, are the initial parameters of the workers.
    """
    run = run_strategy(
        Paced(1, alpha, "paper"),
        workers,
        rounds + 1,
        job=bowl_job(f"sgd(lr={eta})", dimension=1, noise=0, start=start),
        compute=InTurn(1.0),
        network="ideal",
        replicas=None if replicas is None else replicas[:, None],
    )
    return np.array([*run.replicas[:, 0], run.server[0]]) - OPTIMUM
