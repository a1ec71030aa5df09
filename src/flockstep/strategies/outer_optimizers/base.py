"""The interface of an outer optimizer."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from flockstep.arrays.schema import FlatArray
from flockstep.expression import Component


class OuterOptimizer(Component):
    """Computes the next model from the model that all replicas started from and the mean of the replicas.

    An outer optimizer is elementwise: a slice of the model, with its own state, moves as it would within the whole
    model.
    """

    noun: ClassVar[str] = "outer_optimizer"
    moves: ClassVar[bool] = True
    """Whether the optimizer changes the previous model; if not, the mean is the next model and no state is kept."""

    @property
    def resets(self) -> bool:
        """Whether every worker's own optimizer is reset to its initial state after each average."""
        return False

    def start(self, model: FlatArray, workers: int) -> Any:
        """Return the state before the first average; `model`, (K,), holds the parameters from which the replicas
        start.
        """
        return None

    def resize(self, state: Any, workers: int) -> None:
        """Adapt a state, in place, to another number of workers."""

    @abstractmethod
    def move(self, model: FlatArray, mean: FlatArray, state: Any) -> None:
        """Update `model` in place from the mean of the replicas.

        Args:
            model: the parameters that all replicas started from, of shape (K,).
            mean: the mean of the replicas, of shape (K,).
            state: what `start` returned, updated in place.
        """

    def result(self, model: FlatArray, state: Any) -> FlatArray:
        """Return the result (K,) of a training that ends right after an average; `model` holds the parameters from
        which replicas would start.
        """
        return model
