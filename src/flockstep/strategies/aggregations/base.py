"""The contract of an aggregation."""

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
    """The coefficient of each vector in the result; None if the result is no combination with one coefficient per
    vector.
    """


Combine = Callable[[Sequence[FlatArray]], FlatArray]
"""Function that combines several vectors (K,): their mean, or the vector that an aggregation puts in place of the
mean.
"""


class Aggregation(Component):
    """A function of the vectors (K,) of several workers, in place of their mean.

    The breakdown point of an aggregation is the share of workers that may send arbitrary vectors without moving the
    result arbitrarily far: 0 for the mean, at most 1/2 for any aggregation.
    """

    noun: ClassVar[str] = "aggregation"
    linear: ClassVar[bool] = False
    """Whether the result is the mean, which can be computed for any number of vectors, and also for incomplete
    vectors.
    """
    coordinatewise: ClassVar[bool] = False
    """Whether element k of the result depends on the elements k of the vectors alone, so that slices of the vectors can
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
        """Return the smallest number of vectors that are combined when some of `n` are missing: more than half. The
        mean takes any number.
        """
        return n // 2 + 1

    @abstractmethod
    def combine(self, vectors: Sequence[FlatArray], previous: FlatArray | None = None) -> Combined:
        """Combine vectors, which do not change.

        Args:
            vectors: the vectors of different workers, each of shape (K,), all elements finite.
            previous: the previous result (K,), if there is one and the aggregation `remembers`.
        """

    def mix(self, own: FlatArray, others: Sequence[FlatArray], shares: Sequence[float]) -> FlatArray:
        """Combine a worker's own model with those of its neighbors; by default without weights.

        Args:
            own: the worker's model (K,).
            others: the neighbors' models, each of shape (K,).
            shares: W_ij of each neighbor j in the mixing matrix.
        """
        return self.combine([own, *others]).vector
