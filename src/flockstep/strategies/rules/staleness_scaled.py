"""Stale gradients count less."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flockstep.arrays.namespace import namespace
from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError
from flockstep.nodes import Server
from flockstep.strategies.consistency import Push
from flockstep.strategies.rules.base import Rule, mean_of


@dataclass
class Seen:
    """The staleness of every gradient so far: how many there were, and their sum."""

    gradients: int = 0
    staleness: int = 0


@dataclass(frozen=True)
class StalenessScaled(Rule):
    """Staleness-aware learning rate: alpha_0 / tau (Zhang, Gupta, Lian & Liu 2016; Gupta, Zhang & Wang 2016).

    `by="gradient"` (Zhang et al., equation 6): each gradient counts with alpha_0 / max(1, tau), so that a group of c
    moves w by - sum_i alpha(tau_i) g_i / c. `by="mean"` (Gupta et al., section 3.2): every gradient counts with alpha_0
    / max(1, <tau>), where <tau> is `known`, the protocol's mean (n in n-softsync), or else the mean as observed up to
    and including this group. A gradient's factor is the share of a step that it stands for, so that with momentum and
    adaptive optimizers too it moves w by that much of itself over all later steps, and leaves the momentum of earlier
    gradients as it is. Without staleness it is the plain rule, bit for bit.
    """

    by: Literal["gradient", "mean"] = "gradient"
    known: float | None = None

    def __post_init__(self) -> None:
        if self.known is None:
            return
        if self.by != "mean":
            raise ConfigurationError(f"known is a mean staleness, got by={self.by}; use by=mean, or leave known out")
        if not 0 <= self.known < math.inf:
            raise ConfigurationError(f"known must be a mean staleness >= 0, got {self.known}; it is n in n-softsync")

    def start(self, me: Server) -> Seen:
        """Nothing seen."""
        return Seen()

    def apply(self, me: Server, state: Seen, group: Sequence[Push], share: float = 1.0) -> list[float]:
        """The mean weight is the share of a step that is taken along the weighted mean."""
        ages = [me.version - push.version for push in group]
        state.gradients += len(ages)
        state.staleness += sum(ages)
        if self.by == "mean":
            mean = state.staleness / state.gradients if self.known is None else self.known
            weights = [1 / max(1.0, mean)] * len(group)
        else:
            weights = [1 / max(1, age) for age in ages]
        gradient = weighted_mean([push.gradient for push in group], weights)
        me.update(gradient, group[0].lr, share * (sum(weights) / len(weights)))
        return [share * weight / len(group) for weight in weights]


def weighted_mean(gradients: Sequence[FlatArray], weights: Sequence[float]) -> FlatArray:
    """sum_i weight_i g_i / sum_i weight_i; with equal weights the mean, in the same bits."""
    if len(set(weights)) == 1:
        return mean_of(gradients)
    total: FlatArray = namespace(gradients[0]).zeros_like(gradients[0])
    for weight, gradient in zip(weights, gradients, strict=True):
        total += weight / sum(weights) * gradient
    return total
