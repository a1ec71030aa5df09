"""Centered clipping: each vector's difference from a center is clipped, and the clipped differences are averaged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from flockstep.arrays.namespace import zeros
from flockstep.arrays.schema import FlatArray
from flockstep.errors import require
from flockstep.expression import SHOWN
from flockstep.strategies.aggregations.base import Combined
from flockstep.strategies.aggregations.combination import (
    Combination,
    Gram,
    Weights,
    distances_from,
    inner_products,
    weighted_sum,
)


@dataclass(frozen=True)
class CenteredClipping(Combination):
    """Centered clipping (Karimireddy, He & Jaggi 2021, algorithm 2): the mean of differences clipped to length tau.

    v ← v + mean_i (v_i - v) min(1, tau / ||v_i - v||), `iterations` times (L in the paper). The center v starts from
    the previous result, or from 0 in the first step. An attacker moves the result by at most tau / n per iteration.
    `tau` is in units of the gradient's norm: if tau is larger than all differences, the result is the mean; if tau is
    far smaller, every step is short. Between neighbors the center is a worker's own model (He, Karimireddy & Jaggi
    2022).
    """

    tau: float = field(default=10.0, metadata=SHOWN)
    iterations: int = 1
    remembers = True

    def __post_init__(self) -> None:
        require(0 < self.tau < math.inf, "tau of centered_clipping", "> 0 and finite", self.tau, "use for example 10")
        require(self.iterations >= 1, "iterations", ">= 1", self.iterations, "use 1")

    def combine(self, vectors: Sequence[FlatArray], previous: FlatArray | None = None) -> Combined:
        center = zeros(vectors[0], len(vectors[0])) if previous is None else previous
        return super().combine(vectors, center)

    def mix(self, own: FlatArray, others: Sequence[FlatArray], shares: Sequence[float]) -> FlatArray:
        """Combine a worker's model x_i with its neighbors' models by self-centered clipping (He et al. 2022): return
        x_i + sum_j W_ij (x_j - x_i) min(1, tau / ||x_j - x_i||).
        """
        models = [own, *others]
        itself = np.append(1.0, np.zeros(len(others)))
        factors = np.asarray(shares) * clip_factors(distances_from(inner_products(models), itself)[1:], self.tau)
        return weighted_sum(models, np.append(1 - factors.sum(), factors))

    def coefficients(self, gram: Gram) -> Weights:
        """Return the coefficients of the vectors, followed by the coefficient of the center."""
        n = len(gram) - 1
        weights = np.append(np.zeros(n), 1.0)
        for _ in range(self.iterations):
            clipped = clip_factors(distances_from(gram, weights)[:n], self.tau)
            weights = weights * (1 - clipped.mean()) + np.append(clipped / n, 0.0)
        return weights


def clip_factors(distances: Weights, tau: float) -> Weights:
    """Return, for each distance, the factor min(1, tau / distance) that clips a difference of this length to the length
    tau.
    """
    return np.minimum(1.0, tau / np.maximum(distances, np.finfo(np.float64).tiny))
