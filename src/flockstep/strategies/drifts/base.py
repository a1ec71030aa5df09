"""The interface of a drift correction."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from flockstep.arrays.schema import FlatArray
from flockstep.expression import Component
from flockstep.nodes import Server, Worker


@dataclass
class ClientChange:
    """What a client's round has changed, as it has arrived at the server."""

    array: FlatArray
    """The change of the parameters (K,), followed by what the drift correction sends."""
    count: float
    """How often the client was drawn for the round."""
    steps: int
    length: float
    """The length of the local steps, see `Drift.length`."""


class Drift(Component):
    """The interface of a drift correction of `federated`: local steps on different data lead clients to different
    optima, from which the mean of their changes inherits a bias.
    """

    noun: ClassVar[str] = "drift"
    by_round: ClassVar[bool] = False
    """Whether the correction counts rounds that all participants begin at one model."""
    models: ClassVar[int] = 1
    """Number of arrays of the model's size in a message."""

    def client_state(self, me: Worker) -> Any:
        """Return what a client remembers between rounds.

        Raises:
            ConfigurationError: the job's optimizer cannot be corrected.
        """
        return None

    def server_state(self, me: Server) -> Any:
        """Return what the server remembers between rounds."""
        return None

    def sent(self, model: FlatArray, state: Any) -> FlatArray:
        """Return what the server sends to the clients of a round: the `model` (K,), and what belongs to it."""
        return model

    def received(self, array: FlatArray, size: int, counted: int, state: Any) -> FlatArray:
        """Return the model (K,) in what the server has sent; K is `size`.

        `counted` is the last round in which the server has used this client's change: the effects of a dropped change
        on the client's `state` are dropped here.
        """
        return array

    def corrected(self, gradient: FlatArray, params: FlatArray, model: FlatArray, state: Any) -> FlatArray:
        """Return the gradient (K,) of a local step at `params`, in a round that has begun at `model`."""
        return gradient

    def change(self, me: Worker, model: FlatArray, steps: int, number: int, state: Any) -> FlatArray:
        """Return what the client sends after `steps` local steps of round `number`, its change (K,) first."""
        return me.params - model

    def length(self, me: Worker, steps: int) -> float:
        """Return the length of `steps` local steps in the unit of one step of SGD."""
        return float(steps)

    @abstractmethod
    def combined(
        self, me: Server, changes: Mapping[int, ClientChange], weights: Mapping[int, float], state: Any
    ) -> FlatArray:
        """Return the change (K,) of the model in a round: of the `changes` by rank, with their `weights`."""


def weighted(changes: Mapping[int, FlatArray], weights: Mapping[int, float]) -> FlatArray:
    """Return the sum of arrays with their weights, added in order of rank, so that the order of arrival changes no
    bit.
    """
    total: FlatArray | None = None
    for rank, weight in weights.items():
        part = weight * changes[rank]
        total = part if total is None else total + part
    assert total is not None
    return total
