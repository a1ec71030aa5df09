"""The interface of a privacy rule."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

from flockstep.arrays.schema import FlatArray
from flockstep.expression import Component
from flockstep.nodes import Server


class Privacy(Component):
    """The interface of a privacy rule of `federated`, which bounds what the model tells of a single client."""

    noun: ClassVar[str] = "privacy"
    bounded: ClassVar[bool] = False
    """Whether a client's influence is bounded, which needs Poisson sampling and a fixed denominator."""

    @abstractmethod
    def limited(self, change: FlatArray) -> FlatArray:
        """Return the change (K,) that a client sends in place of its own."""

    @abstractmethod
    def released(self, me: Server, mean: FlatArray, weight: float) -> FlatArray:
        """Return the mean change (K,) by which the model moves in place of `mean`; `weight` is that of each change."""

    def rounds(self, clients: int, participants: int) -> float:
        """Return the number of rounds that are allowed.

        Raises:
            ConfigurationError: not even one is.
            MissingDependency: what computes the bound is not installed.
        """
        return math.inf

    def spent(self, rounds: int, clients: int, participants: int) -> float | None:
        """Return epsilon after so many rounds; None if it is not bounded."""
        return None
