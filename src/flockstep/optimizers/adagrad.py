"""Adagrad: a learning rate per parameter that falls with the sum of squared gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flockstep.arrays.namespace import namespace
from flockstep.arrays.schema import FlatArray
from flockstep.errors import require
from flockstep.optimizers.base import BLOCK, Optimizer, OptimizerState, blocks, require_visible


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad (Duchi, Hazan & Singer 2011): steps are divided by the root of the sum of squared gradients.

    With g' = g + weight_decay w at step t = 1, 2, ...: s ← s + g'², w ← w - lr / (1 + (t - 1) lr_decay) g' / (sqrt(s) +
    eps); s starts at initial_accumulator_value and never decreases. For a share of a full step, lr and g'² are
    multiplied by the share. Slots: `square_sum` (s).
    """

    lr: float = 0.01
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        require(0 <= self.lr < math.inf, "lr of adagrad", ">= 0 and finite", self.lr, "use for example 0.01")
        for name in ("lr_decay", "weight_decay", "initial_accumulator_value"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"{name} of adagrad", ">= 0 and finite", value, "use 0 for none")
        require(0 < self.eps < math.inf, "eps of adagrad", "> 0 and finite", self.eps, "use for example 1e-10")

    def init(self, params: FlatArray) -> OptimizerState:
        """Return the initial state for `params`, of shape (K,).

        Raises:
            ConfigurationError: eps is zero in the dtype of `params`.
        """
        require_visible(self.eps, params)
        return OptimizerState(slots={"square_sum": namespace(params).full_like(params, self.initial_accumulator_value)})

    def step(
        self, params: FlatArray, gradient: FlatArray, state: OptimizerState, lr: float, share: float = 1.0
    ) -> None:
        xp, share = namespace(params), float(share)
        rate = float(lr) * share / (1 + state.steps * self.lr_decay)
        state.steps += share
        rows = xp.empty_like(params[:BLOCK]), xp.empty_like(params[:BLOCK])
        for part in blocks(len(params)):
            w, g, s = params[part], gradient[part], state.slots["square_sum"][part]
            first, second = (row[: len(w)] for row in rows)
            if self.weight_decay:
                xp.multiply(w, self.weight_decay, out=first)
                xp.add(first, g, out=first)
                g = first
            xp.multiply(g, g, out=second)
            if share != 1:
                xp.multiply(second, share, out=second)
            xp.add(s, second, out=s)
            xp.sqrt(s, out=second)
            xp.add(second, self.eps, out=second)
            xp.divide(g, second, out=second)
            xp.multiply(second, rate, out=second)
            xp.subtract(w, second, out=w)
