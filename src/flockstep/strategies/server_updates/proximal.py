"""Server update for sparse models: a proximal step for an l1 penalty after the optimizer's step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flockstep.arrays.namespace import namespace
from flockstep.errors import require
from flockstep.expression import SHOWN
from flockstep.nodes import Server
from flockstep.strategies.aggregations.base import Combine
from flockstep.strategies.aggregations.mean import mean_of
from flockstep.strategies.consistency import Push
from flockstep.strategies.server_updates.base import rate_of
from flockstep.strategies.server_updates.plain import Plain


@dataclass(frozen=True)
class Proximal(Plain):
    """Delayed proximal gradient for an l1 penalty (Li, Andersen, Smola & Yu 2014, algorithm 2).

    After the optimizer's step, w ← sign(w) max(0, |w| - lr l1), the proximal operator of lr l1 ||w||_1: in the paper's
    terms a user function on the server. For a share of a full step, the threshold is that share of lr l1; other factors
    by which the optimizer scales its step do not apply to the threshold.
    """

    l1: float = field(default=1e-4, metadata=SHOWN)

    def __post_init__(self) -> None:
        require(0 <= self.l1 < math.inf, "l1 of proximal", ">= 0 and finite", self.l1, "use 0 for no penalty")

    def apply(
        self, me: Server, state: Any, group: Sequence[Push], share: float = 1.0, combine: Combine = mean_of
    ) -> list[float]:
        weights = super().apply(me, state, group, share, combine)
        if self.l1:
            xp = namespace(me.params)
            smaller = (xp.abs(me.params) - rate_of(group) * share * self.l1).clip(0)
            me.params[:] = xp.copysign(smaller, me.params)
        return weights
