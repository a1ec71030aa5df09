"""Krum: selects the vector whose nearest neighbors among the other vectors are closest."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from flockstep.errors import ConfigurationError, require
from flockstep.expression import SHOWN
from flockstep.strategies.aggregations.combination import Combination, Gram, Weights, squared_distances


@dataclass(frozen=True)
class Krum(Combination):
    """Krum (Blanchard, El Mhamdi, Guerraoui & Stainer 2017, section 4): selects the vector with the smallest score.

    The score of v_i is the sum of the squared distances from v_i to its n - f - 2 nearest other vectors; of equal
    scores the smallest rank is chosen. Krum withstands `f` of n workers, where n >= 2f + 3. A step uses the gradient of
    one worker, so that the batch is 1/n of the workers' batches.
    """

    f: int = field(default=1, metadata=SHOWN)

    def __post_init__(self) -> None:
        require(self.f >= 0, "f", ">= 0 attackers", self.f, "use 0 for none")

    def check(self, n: int) -> None:
        """Check that n >= 2f + 3, so that Krum withstands f attackers among `n` workers."""
        if n < 2 * self.f + 3:
            fewer = f"use f <= {(n - 3) // 2}, " if n >= 3 else "use "
            raise ConfigurationError(
                f"krum needs n >= 2f + 3 vectors, got n={n} and f={self.f}; {fewer}more workers, or median"
            )

    def least(self, n: int) -> int:
        """Return 2f + 3, the smallest number of vectors among which Krum withstands f attackers."""
        return 2 * self.f + 3

    def coefficients(self, gram: Gram) -> Weights:
        return chosen(gram, self.f, 1)


def chosen(gram: Gram, f: int, m: int) -> Weights:
    """Return the coefficients of the vectors: 1/m for the m vectors with the smallest Krum scores, and 0 for the other
    vectors.
    """
    n = len(gram)
    distances = squared_distances(gram)
    np.fill_diagonal(distances, np.inf)
    scores = np.sort(distances, axis=1)[:, : n - f - 2].sum(axis=1)
    weights = np.zeros(n)
    weights[np.argsort(scores, kind="stable")[:m]] = 1 / m
    return weights
