"""Aggregations that return a weighted sum of the vectors, with weights that depend on the distances between vectors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flockstep.arrays.namespace import cast, is_tensor, namespace, to_host, zeros
from flockstep.arrays.schema import FlatArray
from flockstep.strategies.aggregations.base import Aggregation, Combined

BLOCK, TENSOR_BLOCK = 1 << 15, 1 << 22
"""Number of elements of each vector that are multiplied at a time: of numpy arrays (BLOCK), and of tensors
(TENSOR_BLOCK).
"""
FAR = 1e60
"""A vector counts as out of reach if its squared norm exceeds `FAR` times the larger of 1 and the median squared norm.
The vector's inner products may overflow, and an iteration that starts at the mean would not return from there.
"""
Gram = npt.NDArray[np.float64]
"""The inner products of n vectors: an array of shape (n, n)."""
Weights = npt.NDArray[np.float64]
"""The coefficients of n vectors: an array of shape (n,)."""


class Combination(Aggregation):
    """An aggregation whose result is the sum of c_i v_i, with coefficients c that depend only on the inner products of
    the vectors.

    The vectors are read twice, once for the inner products and once for the sum, however many iterations an aggregation
    takes: the distance of v_i from any combination of the vectors follows from the inner products.
    """

    @abstractmethod
    def coefficients(self, gram: Gram) -> Weights:
        """Return the coefficient of each vector.

        Args:
            gram: the inner products (n, n) of the vectors; if there is a previous result, it is the last vector.
        """

    def combine(self, vectors: Sequence[FlatArray], previous: FlatArray | None = None) -> Combined:
        every = list(vectors) if previous is None else [*vectors, previous]
        weights = self.coefficients(inner_products(every))
        return Combined(weighted_sum(every, weights), [float(c) for c in weights[: len(vectors)]])


def inner_products(vectors: Sequence[FlatArray]) -> Gram:
    """Return the inner products <v_i, v_j> for all pairs of vectors, in float64; infinite or NaN where a product is too
    large.
    """
    xp, size = namespace(vectors[0]), TENSOR_BLOCK if is_tensor(vectors[0]) else BLOCK
    gram: Any = zeros(vectors[0], len(vectors), len(vectors), dtype="float64")
    for start in range(0, len(vectors[0]), size):
        block = xp.stack([cast(vector[start : start + size], "float64", copy=False) for vector in vectors])
        with np.errstate(over="ignore", invalid="ignore"):
            gram += block @ block.T
    return to_host(gram)


def squared_distances(gram: Gram) -> Gram:
    """Return the squared distances ||v_i - v_j||² for all pairs of vectors, of shape (n, n)."""
    squares = np.diag(gram)
    with np.errstate(invalid="ignore"):
        return np.maximum(squares[:, None] + squares[None, :] - 2 * gram, 0)


def distances_from(gram: Gram, weights: Weights) -> Weights:
    """Return the distances ||v_i - sum_j c_j v_j|| for all i. A vector out of reach has distance infinity, and is left
    out of the sum.
    """
    squares = np.diag(gram)
    far = squares > FAR * max(1.0, float(np.median(squares)))
    if far.any():
        gram = np.where(far[:, None] | far[None, :], 0.0, gram)
    found = np.sqrt(np.maximum(np.diag(gram) - 2 * (gram @ weights) + weights @ gram @ weights, 0))
    return np.where(far, np.inf, found)


def weighted_sum(vectors: Sequence[FlatArray], weights: Weights) -> FlatArray:
    """Return the sum of c_i v_i, of shape (K,). A vector whose coefficient is 0 has no effect, even if the vector is
    not finite.
    """
    total: FlatArray | None = None
    for vector, weight in zip(vectors, weights, strict=True):
        if weight:
            term = vector * float(weight)
            if total is None:
                total = term
            else:
                total += term
    return zeros(vectors[0], len(vectors[0])) if total is None else total
