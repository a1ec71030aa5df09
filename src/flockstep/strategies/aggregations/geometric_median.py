"""The geometric median, by Weiszfeld's algorithm."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flockstep.errors import require
from flockstep.strategies.aggregations.combination import Combination, Gram, Weights, distances_from


@dataclass(frozen=True)
class GeometricMedian(Combination):
    """Geometric median by the smoothed Weiszfeld algorithm (RFA: Pillutla, Kakade & Harchaoui 2022): breakdown point
    1/2.

    The result is the point z with the smallest sum of distances ||z - v_i||. From the mean, repeat beta_i = 1 / max(nu,
    ||z - v_i||), z ← sum_i beta_i v_i / sum_i beta_i. The paper takes 3 iterations, because each of them is a round of
    messages. In flockstep, `iterations` may be larger, because no iteration reads the vectors.
    """

    nu: float = 1e-6
    iterations: int = 100

    def __post_init__(self) -> None:
        require(0 < self.nu < np.inf, "nu of geometric_median", "> 0 and finite", self.nu, "use 1e-6")
        require(self.iterations >= 1, "iterations", ">= 1", self.iterations, "use for example 100")

    def coefficients(self, gram: Gram) -> Weights:
        weights = np.full(len(gram), 1 / len(gram))
        for _ in range(self.iterations):
            beta = 1 / np.maximum(self.nu, distances_from(gram, weights))
            weights = beta / beta.sum()
        return weights
