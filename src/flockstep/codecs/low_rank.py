"""The layout of low-rank factorization: which tensors of a flat array are factored, and where their factors are
stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np

from flockstep.arrays.namespace import first_not_finite
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Shape
from flockstep.errors import Diverged


@dataclass(frozen=True)
class TensorMatrix:
    """A tensor of the flat array as a matrix: rows are its first dimension, columns all other dimensions together."""

    part: slice
    rows: int
    columns: int


@dataclass(frozen=True)
class LowRank:
    """The layout of a flat array of tensors, some of which are factored, as matrix ≈ P (rows, rank) Qᵀ (rank, columns),
    while others are sent dense.

    Tensors of one dimension are dense, and so are matrices that are no larger than their factors.
    """

    shapes: tuple[Shape, ...]
    rank: int
    ratio: float = 1.0
    """Bytes of a factor's element divided by bytes of an element of the array."""

    @cached_property
    def matrices(self) -> tuple[TensorMatrix, ...]:
        """The tensors that are factored, in the order of the flat array."""
        found, start = [], 0
        for shape in self.shapes:
            size = math.prod(shape)
            if len(shape) > 1 and self.ratio * self.rank * (shape[0] + size // max(1, shape[0])) < size:
                found.append(TensorMatrix(slice(start, start + size), shape[0], size // shape[0]))
            start += size
        return tuple(found)

    @cached_property
    def dense(self) -> tuple[slice, ...]:
        """The slices of the flat array that are sent dense, in order; adjacent slices are joined."""
        edges = [0, *(edge for m in self.matrices for edge in (m.part.start, m.part.stop)), self.size]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return tuple(slice(a, b) for a, b in pairs if a < b)

    @property
    def size(self) -> int:
        """Number of elements of the flat array."""
        return sum(map(math.prod, self.shapes))

    @cached_property
    def dense_size(self) -> int:
        """Number of elements that are sent dense."""
        return self.size - sum(m.rows * m.columns for m in self.matrices)

    @cached_property
    def lefts(self) -> list[slice]:
        """The slice of each matrix's P in the concatenation of all P."""
        return _neighbors([m.rows * self.rank for m in self.matrices])

    @cached_property
    def rights(self) -> list[slice]:
        """The slice of each matrix's Q in the concatenation of all Q."""
        return _neighbors([m.columns * self.rank for m in self.matrices])


@lru_cache(maxsize=1024)
def low_rank(shapes: tuple[Shape, ...], rank: int, ratio: float = 1.0) -> LowRank:
    """Return the layout of the factors for tensors of these shapes; layouts are cached."""
    return LowRank(shapes, rank, ratio)


def _neighbors(sizes: Sequence[int]) -> list[slice]:
    """Return adjacent slices of these sizes, starting at 0."""
    return [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def factor_dtype(dtype: str) -> np.dtype[np.floating]:
    """Return the dtype of the factors of an array of the given dtype."""
    return np.dtype(np.float64 if dtype == "float64" else np.float32)


def not_finite(codec: str, flat: FlatArray, part: slice) -> Diverged:
    """Return the error to raise if a slice of an array contains infinities or NaN, or if products of its elements
    overflow.
    """
    where = first_not_finite(flat[part])
    what = "numbers so large that their products overflow"
    if where >= 0:
        what = f"{float(flat[part.start + where])} at element {part.start + where}"
    return Diverged(f"cannot encode {what} with {codec}; lower the learning rate or clip the gradient")
