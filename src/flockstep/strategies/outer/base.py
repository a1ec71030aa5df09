"""The contract of an outer optimiser."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from flockstep.arrays.schema import FlatArray
from flockstep.expression import Component


class Outer(Component):
    """What becomes of the model that all replicas began from, given the mean of those that they ended with.

    Elementwise: a part of the model, with a state of its own, moves as it would within the whole.
    """

    noun: ClassVar[str] = "outer"
    moves: ClassVar[bool] = True
    """Otherwise the mean itself is the next model, and neither the last one nor a state is kept."""

    @property
    def resets(self) -> bool:
        """Whether every worker's own optimizer forgets its state after each mean."""
        return False

    def start(self, model: FlatArray, workers: int) -> Any:
        """What it remembers before the first mean; `model`, (K,), is what the replicas begin from."""
        return None

    @abstractmethod
    def move(self, model: FlatArray, mean: FlatArray, state: Any) -> None:
        """Turn `model`, (K,), from which all replicas began, into the next one, in place."""

    def result(self, model: FlatArray, state: Any) -> FlatArray:
        """The model, (K,), that training ends with right after a mean; `model` is what replicas would begin from."""
        return model
