"""The interface of an aggregation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

from flockstep.arrays.schema import FlatArray
from flockstep.expression import Component


class Combined(NamedTuple):
    """The result of an aggregation."""

    vector: FlatArray
    """The combined vector (K,)."""
    weights: Sequence[float] | None
    """The coefficient of each vector in the result; None if the result is not a sum of vectors with one coefficient
    each.
    """


Combine = Callable[[Sequence[FlatArray]], FlatArray]
"""Function that combines several vectors (K,) into one: into their mean, or as an aggregation does."""


class Aggregation(Component):
    """A function that combines the vectors (K,) of several workers, used in place of their mean.

    The breakdown point of an aggregation is the share of workers that may send arbitrary vectors without moving the
    result arbitrarily far: 0 for the mean, at most 1/2 for any aggregation.
    """

    noun: ClassVar[str] = "aggregation"
    linear: ClassVar[bool] = False
    """Whether the result is the mean, which can be computed for any number of vectors, even from incomplete vectors."""
    coordinatewise: ClassVar[bool] = False
    """Whether element k of the result depends only on the elements k of the vectors, so that slices of the vectors can
    be combined separately.
    """
    remembers: ClassVar[bool] = False
    """Whether a result depends on the previous result."""

    def check(self, n: int) -> None:
        """Check that `n` vectors can be combined.

        Raises:
            ConfigurationError: `n` is outside the bounds of the method.
        """

    def least(self, n: int) -> int:
        """Return the smallest number of vectors that may be combined when some of `n` are missing: more than half."""
        return n // 2 + 1

    @abstractmethod
    def combine(self, vectors: Sequence[FlatArray], previous: FlatArray | None = None) -> Combined:
        """Combine vectors; the vectors do not change.

        Args:
            vectors: the vectors of different workers, each of shape (K,), all elements finite.
            previous: the previous result (K,), if there is one and the aggregation `remembers`.
        """

    def mix(self, own: FlatArray, others: Sequence[FlatArray], shares: Sequence[float]) -> FlatArray:
        """Combine a worker's own model with the models of its neighbors; by default, weights are ignored.

        Args:
            own: the worker's model (K,).
            others: the neighbors' models, each of shape (K,).
            shares: W_ij of each neighbor j in the mixing matrix.
        """
        return self.combine([own, *others]).vector
