"""The coordinate-wise median."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flockstep.arrays.schema import FlatArray
from flockstep.strategies.aggregations.base import Aggregation, Combined
from flockstep.strategies.aggregations.order import by_order


@dataclass(frozen=True)
class Median(Aggregation):
    """Coordinate-wise median (Yin, Chen, Ramchandran & Bartlett 2018, definition 1): breakdown point 1/2.

    Element k is the median of the n elements k, for even n the mean of the two in the middle. If the workers' gradients
    are skewed, the median differs from the mean even without attackers.
    """

    coordinatewise = True

    def combine(self, vectors: Sequence[FlatArray], previous: FlatArray | None = None) -> Combined:
        return Combined(by_order(vectors, middle), None)


def middle(ordered: Sequence[Any]) -> Any:
    """Return the elementwise median of several arrays that are in ascending order, element by element."""
    upper = len(ordered) // 2
    return ordered[upper] if len(ordered) % 2 else (ordered[upper - 1] + ordered[upper]) / 2
