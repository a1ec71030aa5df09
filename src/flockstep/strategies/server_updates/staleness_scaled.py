"""Server update that divides the learning rate by the staleness of each gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from flockstep.arrays.namespace import namespace
from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError, require
from flockstep.nodes import Server
from flockstep.strategies.aggregations.base import Combine
from flockstep.strategies.aggregations.mean import mean_of
from flockstep.strategies.consistency import Push
from flockstep.strategies.server_updates.base import ServerUpdate, rate_of


@dataclass
class Seen:
    """The update's state: the number and the total staleness of the gradients so far."""

    gradients: int = 0
    staleness: int = 0


@dataclass(frozen=True)
class StalenessScaled(ServerUpdate):
    """Staleness-aware learning rate: alpha_0 / tau (Zhang, Gupta, Lian & Liu 2016; Gupta, Zhang & Wang 2016).

    `by="gradient"` (Zhang et al., equation 6): each gradient counts with alpha_0 / max(1, tau), so that a group of c
    gradients moves w by - sum_i alpha(tau_i) g_i / c. `by="mean"` (Gupta et al., section 3.2): every gradient counts
    with alpha_0 / max(1, <tau>), where <tau> is `known`, the protocol's mean staleness (n in n-softsync), or by default
    the mean observed up to and including this group. A gradient's factor is the share of a step that the gradient
    makes. So even with momentum and adaptive optimizers, the gradient moves w by this factor over all later steps, and
    the momentum of earlier gradients does not change. Without staleness the rule equals the plain rule, bit for bit.
    """

    weighs: ClassVar[bool] = True
    by: Literal["gradient", "mean"] = "gradient"
    known: float | None = None

    def __post_init__(self) -> None:
        if self.known is None:
            return
        if self.by != "mean":
            raise ConfigurationError(
                f"known is a mean staleness and needs by=mean, got by={self.by}; use by=mean, or leave out known"
            )
        require(0 <= self.known < math.inf, "known", "a mean staleness >= 0", self.known, "for n-softsync use n")

    def start(self, me: Server) -> Seen:
        return Seen()

    def apply(
        self, me: Server, state: Seen, group: Sequence[Push], share: float = 1.0, combine: Combine = mean_of
    ) -> list[float]:
        """Take a step along the weighted mean of the gradients. The mean weight is the share of a full step that the
        group makes.
        """
        ages = [me.version - push.version for push in group]
        state.gradients += len(ages)
        state.staleness += sum(ages)
        if self.by == "mean":
            mean = state.staleness / state.gradients if self.known is None else self.known
            weights = [1 / max(1.0, mean)] * len(group)
        else:
            weights = [1 / max(1, age) for age in ages]
        gradient = weighted_mean([push.gradient for push in group], weights)
        me.update(gradient, rate_of(group), share * (sum(weights) / len(weights)))
        return [share * weight / len(group) for weight in weights]


def weighted_mean(gradients: Sequence[FlatArray], weights: Sequence[float]) -> FlatArray:
    """Return sum_i weight_i g_i / sum_i weight_i. If all weights are equal, the result equals the plain mean, bit for
    bit.
    """
    if len(set(weights)) == 1:
        return mean_of(gradients)
    total: FlatArray = namespace(gradients[0]).zeros_like(gradients[0])
    for weight, gradient in zip(weights, gradients, strict=True):
        total += weight / sum(weights) * gradient
    return total
