"""The interface of an outer optimizer."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from flockstep.arrays.schema import FlatArray
from flockstep.expression import Component
from flockstep.nodes import Worker


class OuterOptimizer(Component):
    """The interface of an outer optimizer, which computes the next model from the model that all replicas started from
    and the mean of the replicas.

    An outer optimizer is elementwise: a slice of the model, with its own state, moves as it would within the whole
    model.
    """

    noun: ClassVar[str] = "outer_optimizer"
    moves: ClassVar[bool] = True
    """Whether the optimizer keeps a state and changes the previous model. If False, the mean of the replicas is the
    next model.
    """

    @property
    def resets(self) -> bool:
        """Whether the local optimizer of every worker is reset to its initial state after each average."""
        return False

    def start(self, model: FlatArray, workers: int) -> Any:
        """Return the optimizer's state before the first average; `model` (K,) holds the parameters from which the
        replicas start.
        """
        return None

    def resize(self, state: Any, workers: int) -> None:
        """Adapt the optimizer's state, in place, to another number of workers."""

    def follow(self, me: Worker, state: Any) -> None:
        """Adapt the state, in place, to the learning rate of a worker, before a move; by default, do nothing."""

    @abstractmethod
    def move(self, model: FlatArray, mean: FlatArray, state: Any) -> None:
        """Update `model` in place from the mean of the replicas.

        Args:
            model: the parameters that all replicas started from, of shape (K,).
            mean: the mean of the replicas, of shape (K,).
            state: the optimizer's state, which `start` returned; updated in place.
        """

    def result(self, model: FlatArray, state: Any) -> FlatArray:
        """Return the resulting parameters (K,) of a training that ends right after an average; `model` (K,) holds the
        parameters from which replicas would continue.
        """
        return model
