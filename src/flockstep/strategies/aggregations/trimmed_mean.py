"""The coordinate-wise trimmed mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError, require
from flockstep.expression import SHOWN
from flockstep.strategies.aggregations.base import Aggregation, Combined
from flockstep.strategies.aggregations.mean import mean_of
from flockstep.strategies.aggregations.order import by_order


@dataclass(frozen=True)
class TrimmedMean(Aggregation):
    """Coordinate-wise trimmed mean (Yin, Chen, Ramchandran & Bartlett 2018, definition 2): withstands b of n workers.

    Element k is the mean of the n elements k without the b smallest and the b largest, where 2b < n; b = beta n in the
    paper. With b = 0 the result is the mean, up to rounding.
    """

    b: int = field(default=1, metadata=SHOWN)
    coordinatewise = True

    def __post_init__(self) -> None:
        require(self.b >= 0, "b of trimmed_mean", ">= 0 workers", self.b, "0 is the mean")

    def check(self, n: int) -> None:
        """Check that 2b < n, so that trimming leaves at least one of `n` values."""
        if 2 * self.b >= n:
            raise ConfigurationError(
                f"trimmed_mean drops the b smallest and the b largest of n elements, so 2b must be < n, got b={self.b} "
                f"and n={n} vectors; use b <= {max(0, (n - 1) // 2)}, or more workers"
            )

    def least(self, n: int) -> int:
        """Return 2b + 1, the smallest number of vectors that leaves one vector after trimming."""
        return 2 * self.b + 1

    def combine(self, vectors: Sequence[FlatArray], previous: FlatArray | None = None) -> Combined:
        def trimmed(ordered: Sequence[Any]) -> Any:
            return mean_of(ordered[self.b : len(ordered) - self.b])

        return Combined(by_order(vectors, trimmed), None)
