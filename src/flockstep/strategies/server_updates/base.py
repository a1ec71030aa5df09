"""The interface of a server update."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal, Protocol

from flockstep.expression import Component
from flockstep.nodes import Server
from flockstep.strategies.aggregations.base import Combine
from flockstep.strategies.aggregations.mean import mean_of
from flockstep.strategies.consistency import Push
from flockstep.strategies.traits import Memory


class ServerUpdate(Component):
    """The interface of a server update, which decides how released gradients change the server's parameters."""

    noun: ClassVar[str] = "server_update"
    weighs: ClassVar[bool] = False
    """Whether the server update weights the gradients of a group, instead of calling `combine`."""
    compares_reads: ClassVar[bool] = False
    """Whether the server update depends on the parameters that each worker has read, so that the server calls `read` at
    every read.
    """

    clips: ClassVar[Literal["combined", "none"]] = "none"
    """"combined" if the update steps the job's optimizer along the mean of a group, which the server can clip before
    the step; otherwise "none".
    """

    memory: ClassVar[Memory] = "optimizer"
    """State of past steps that the server keeps under this update, a value of `Traits.memory`."""

    def start(self, me: Server) -> Any:
        """Return the update's state before the first gradient. The server stores this state in its own state."""
        return None

    @abstractmethod
    def apply(
        self, me: Server, state: Any, group: Sequence[Push], share: float = 1.0, combine: Combine = mean_of
    ) -> list[float]:
        """Apply gradients that were released together, in this order, as one step: `me.version` grows by one.

        The staleness of a gradient is `me.version - push.version`.

        Args:
            me: the server.
            state: the rule's state.
            group: the gradients, of shape (K,), with their versions and learning rates, whose mean the step takes
                (`rate_of`).
            share: the part of a full step that the group makes; 1 if it contains all gradients of a step.
            combine: the function that combines the gradients of the group; the mean, or another aggregation.

        Returns:
            The weight of each gradient: the factor on the learning rate with which it was applied.
        """

    def read(self, me: Server, state: Any, rank: int) -> None:
        """Record that the current parameters are sent to the worker `rank`."""


class Rated(Protocol):
    """An object with the learning rate of a gradient: a received gradient, or the note sent with a gradient."""

    @property
    def lr(self) -> float:
        """Learning rate of the step in which the worker computed the gradient."""


def rate_of(group: Iterable[Rated]) -> float:
    """Return the learning rate for a step along a group of gradients: the mean of the gradients' rates.

    The rates differ if the gradients are of different steps of a schedule.
    """
    rates = [one.lr for one in group]
    return rates[0] if rates.count(rates[0]) == len(rates) else math.fsum(rates) / len(rates)


def equal_weights(group: Sequence[Push], share: float) -> list[float]:
    """Return the weight of each gradient of a group whose mean is applied; all weights are equal."""
    return [share / len(group)] * len(group)
