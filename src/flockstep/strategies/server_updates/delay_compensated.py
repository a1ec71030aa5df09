"""DC-ASGD: corrects stale gradients to first order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from flockstep.arrays.namespace import copied, namespace
from flockstep.arrays.schema import FlatArray
from flockstep.errors import require
from flockstep.nodes import Server
from flockstep.optimizers.base import require_visible
from flockstep.strategies.aggregations.base import Combine
from flockstep.strategies.aggregations.mean import mean_of
from flockstep.strategies.consistency import Push
from flockstep.strategies.server_updates.base import ServerUpdate, equal_weights, rate_of


@dataclass
class DelayCompensationState:
    """The update's state: the parameters w_bak that each worker read last, and the moving mean of squared gradients."""

    initial: FlatArray
    backups: dict[int, FlatArray]
    """Rank → the parameters (K,) that the worker read last; workers that read the same version share the array."""
    copied: int
    """Version of the parameters of which `backups` holds the most recent copy."""
    latest: FlatArray
    mean_square: FlatArray | None


@dataclass(frozen=True)
class DelayCompensated(ServerUpdate):
    """DC-ASGD (Zheng et al. 2017, algorithm 2 and section 5): stale gradients are corrected to first order.

    The gradient g of worker m, computed at the parameters w_bak(m) that it read, becomes g + lambda g * g * (w -
    w_bak(m)), where g * g approximates the diagonal of the Hessian; then the job's optimizer steps along the result.
    `form="constant"` (DC-ASGD-c): lambda = lambda0, 0.04 in the paper. `form="adaptive"` (DC-ASGD-a): lambda = lambda0
    / sqrt(MS + eps) elementwise, MS ← m MS + (1 - m) g², lambda0 = 2. The paper keeps one MS on the server, and so does
    this rule; the authors' code keeps one MS per worker. With one worker, or with lambda0 = 0, the rule equals the
    plain rule, bit for bit. `lambda0=none` stands for the paper's value. The server stores a copy of the parameters for
    each version with which a worker still computes.
    """

    compares_reads: ClassVar[bool] = True
    form: Literal["adaptive", "constant"] = "adaptive"
    lambda0: float | None = None
    m: float = 0.95
    eps: float = 1e-7

    def __post_init__(self) -> None:
        require(0 <= self.strength < math.inf, "lambda0", ">= 0 and finite", self.strength, "use 0 for no correction")
        require(0 <= self.m < 1, "m of delay_compensated", "in [0, 1)", self.m, "use for example 0.95")
        require(0 < self.eps < math.inf, "eps of delay_compensated", "> 0 and finite", self.eps, "use 1e-7")

    @property
    def strength(self) -> float:
        """The strength lambda0 of the correction, by default the paper's value."""
        if self.lambda0 is not None:
            return self.lambda0
        return 2.0 if self.form == "adaptive" else 0.04

    def start(self, me: Server) -> DelayCompensationState:
        """Return the initial state, in which every worker has read the initial parameters."""
        initial = copied(me.params)
        mean_square = None
        if self.form == "adaptive":
            require_visible(self.eps, me.params)
            mean_square = namespace(initial).zeros_like(initial)
        return DelayCompensationState(initial, {}, me.version, initial, mean_square)

    def read(self, me: Server, state: DelayCompensationState, rank: int) -> None:
        """Store the current parameters as the backup of worker `rank`: w_bak(rank) ← w."""
        if state.copied != me.version:
            state.copied, state.latest = me.version, copied(me.params)
        state.backups[rank] = state.latest

    def apply(
        self,
        me: Server,
        state: DelayCompensationState,
        group: Sequence[Push],
        share: float = 1.0,
        combine: Combine = mean_of,
    ) -> list[float]:
        """Compensate each gradient, and take a step along the combination of the gradients that `combine` returns."""
        compensated = []
        for push in group:
            rate = self._lambda(state, push.gradient)
            backup = state.backups.get(push.rank, state.initial)
            curvature = rate * push.gradient * push.gradient if self.strength else None
            compensated.append(compensate(push.gradient, curvature, me.params, backup))
        me.update(combine(compensated), rate_of(group), share)
        return equal_weights(group, share)

    def _lambda(self, state: DelayCompensationState, gradient: FlatArray) -> Any:
        """Update the moving mean with this gradient, and return lambda: a scalar, or an array of shape (K,)."""
        if state.mean_square is None:
            return self.strength
        state.mean_square *= self.m
        state.mean_square += (1 - self.m) * (gradient * gradient)
        return self.strength / namespace(gradient).sqrt(state.mean_square + self.eps)


def compensate(gradient: FlatArray, curvature: FlatArray | None, params: FlatArray, backup: FlatArray) -> FlatArray:
    """Return the gradient at w to first order: g(w_bak) + h * (w - w_bak), where h is the diagonal of the Hessian."""
    if curvature is None:
        return gradient
    result: FlatArray = gradient + curvature * (params - backup)
    return result
