"""The contract of a server's update rule."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from flockstep.arrays.namespace import copied
from flockstep.arrays.schema import FlatArray
from flockstep.expression import Component
from flockstep.nodes import Server
from flockstep.strategies.consistency import Push
from flockstep.strategies.traits import Memory


class Rule(Component):
    """How released gradients change the server's parameters."""

    noun: ClassVar[str] = "rule"
    compares_reads: ClassVar[bool] = False
    """It goes by what each worker has read, and must be told of every read."""

    clips: ClassVar[Literal["combined", "none"]] = "none"
    """Combined: it steps the job's optimizer along the mean of a group, which the server can clip before."""

    memory: ClassVar[Memory] = "optimizer"
    """What it remembers of past steps, as in `Traits.memory`."""

    def start(self, me: Server) -> Any:
        """What the rule remembers, before the first gradient; it belongs to the server's state."""
        return None

    @abstractmethod
    def apply(self, me: Server, state: Any, group: Sequence[Push], share: float = 1.0) -> list[float]:
        """Apply gradients that were released together, in this order, as one step: `me.version` grows by one.

        The staleness of a gradient is `me.version - push.version`. `share` is the part of a full step that the group
        stands for, 1 where all gradients of a step are in it. Returns the weight of each gradient: the multiple of the
        learning rate at which it was applied.
        """

    def read(self, me: Server, state: Any, rank: int) -> None:
        """Worker `rank` is being handed the parameters as they are now."""


def equal_weights(group: Sequence[Push], share: float) -> list[float]:
    """The weight of each gradient where the mean of the group is applied."""
    return [share / len(group)] * len(group)


def mean_of(gradients: Sequence[FlatArray]) -> FlatArray:
    """Their mean, summed in this order; a single one is returned as it is."""
    if len(gradients) == 1:
        return gradients[0]
    mean: FlatArray = copied(gradients[0])
    for gradient in gradients[1:]:
        mean += gradient
    mean /= len(gradients)
    return mean
