"""The mean as aggregation: every vector contributes equally."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flockstep.arrays.namespace import copied
from flockstep.arrays.schema import FlatArray
from flockstep.strategies.aggregations.base import Aggregation, Combined


@dataclass(frozen=True)
class Mean(Aggregation):
    """The mean of the vectors: a single worker can move the mean arbitrarily far (Blanchard et al. 2017, lemma 1)."""

    linear = True
    coordinatewise = True

    def combine(self, vectors: Sequence[FlatArray], previous: FlatArray | None = None) -> Combined:
        return Combined(mean_of(vectors), [1 / len(vectors)] * len(vectors))


def mean_of(gradients: Sequence[FlatArray]) -> FlatArray:
    """Return the mean of the gradients, summed in the given order; a single gradient is returned without a copy."""
    if len(gradients) == 1:
        return gradients[0]
    mean: FlatArray = copied(gradients[0])
    for gradient in gradients[1:]:
        mean += gradient
    mean /= len(gradients)
    return mean
