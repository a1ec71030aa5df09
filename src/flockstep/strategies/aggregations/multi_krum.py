"""Multi-Krum: averages the vectors with the smallest Krum scores."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.errors import ConfigurationError, require
from flockstep.strategies.aggregations.combination import Gram, Weights
from flockstep.strategies.aggregations.krum import Krum, chosen


@dataclass(frozen=True)
class MultiKrum(Krum):
    """Multi-Krum (Blanchard, El Mhamdi, Guerraoui & Stainer 2017, section 4): the mean of the `m` vectors with the
    smallest scores.

    The scores are those of `krum`. `m=none` is n - f - 2, the largest number for which Damaskinos et al. (2019,
    theorem 1) prove that f attackers are withstood; m = 1 is Krum.
    """

    m: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.m is None or self.m >= 1, "m", ">= 1 vectors", self.m, "1 is krum")

    def check(self, n: int) -> None:
        """Check that n >= 2f + 3 and m <= n - f - 2, so that Multi-Krum withstands f attackers among `n` workers."""
        super().check(n)
        if self.m is not None and self.m > n - self.f - 2:
            raise ConfigurationError(
                f"multi_krum withstands f attackers for m <= n - f - 2, got m={self.m}, n={n} and f={self.f}; use "
                f"m <= {n - self.f - 2}, or m=none for the largest"
            )

    def least(self, n: int) -> int:
        """Return the smallest number of vectors that may be combined: 2f + 3, or m + f + 2 if m + f + 2 is larger."""
        return max(super().least(n), (self.m or 0) + self.f + 2)

    def coefficients(self, gram: Gram) -> Weights:
        return chosen(gram, self.f, self.m or len(gram) - self.f - 2)
