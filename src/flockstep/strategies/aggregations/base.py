"""The interface of an aggregation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

from flockstep.arrays.schema import FlatArray
from flockstep.expression import Component


class Combined(NamedTuple):
    """The result of an aggregation: the combined vector, and the weights of the vectors in it."""

    vector: FlatArray
    """The combined vector (K,)."""
    weights: Sequence[float] | None
    """The coefficient of each vector in the result; None if the result is not a sum of vectors with one coefficient
    each.
    """


Combine = Callable[[Sequence[FlatArray]], FlatArray]
"""Function that combines several vectors of shape (K,) into one, by their mean or by another aggregation."""


class Aggregation(Component):
    """A function that combines the vectors (K,) of several workers into one vector (K,), in place of the mean.

    The breakdown point of an aggregation is the share of workers that may send arbitrary vectors without moving the
    result arbitrarily far: 0 for the mean, at most 1/2 for any aggregation.
    """

    noun: ClassVar[str] = "aggregation"
    linear: ClassVar[bool] = False
    """Whether the result is the mean of the vectors, which is defined for any number of vectors, and for vectors of
    which some elements were not sent.
    """
    coordinatewise: ClassVar[bool] = False
    """Whether element k of the result depends only on the elements k of the vectors, so that slices of the vectors can
    be combined separately.
    """
    remembers: ClassVar[bool] = False
    """Whether the result of a step depends on the result of the previous step."""

    def check(self, n: int) -> None:
        """Check that `n` vectors can be combined.

        Raises:
            ConfigurationError: `n` is outside the bounds of the method.
        """

    def least(self, n: int) -> int:
        """Return the smallest number of vectors that may be combined when some of the `n` vectors are missing; by
        default, more than half.
        """
        return n // 2 + 1

    @abstractmethod
    def combine(self, vectors: Sequence[FlatArray], previous: FlatArray | None = None) -> Combined:
        """Return the combination of the vectors, without changing the vectors.

        Args:
            vectors: the vectors of different workers, each of shape (K,), all elements finite.
            previous: the previous result (K,), if there is one and the aggregation `remembers`.
        """

    def mix(self, own: FlatArray, others: Sequence[FlatArray], shares: Sequence[float]) -> FlatArray:
        """Combine a worker's own model with the models of its neighbors. By default, the weights are ignored.

        Args:
            own: the worker's model (K,).
            others: the neighbors' models, each of shape (K,).
            shares: the weight W_ij of each neighbor j in the mixing matrix.
        """
        return self.combine([own, *others]).vector
