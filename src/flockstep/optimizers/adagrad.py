"""Adagrad."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.optimizers.base import BLOCK, Optimizer, OptimizerState, blocks, require, require_visible


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad (Duchi, Hazan & Singer 2011).

    With g' = g + weight_decay w at step t = 1, 2, ...: s ← s + g'², w ← w - lr / (1 + (t - 1) lr_decay) g' / (sqrt(s) +
    eps); s starts at initial_accumulator_value and never shrinks. For a share of a full step
    lr and g'² are multiplied by the share. Slots: `square_sum` (s).
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
        """A fresh state for `params`.

        Raises:
            ConfigurationError: eps is zero in the dtype of `params`.
        """
        require_visible(self.eps, params)
        return OptimizerState(slots={"square_sum": np.full_like(params, self.initial_accumulator_value)})

    def step(
        self, params: FlatArray, gradient: FlatArray, state: OptimizerState, lr: float, share: float = 1.0
    ) -> None:
        """Update `params` and `state` in place; `gradient` is left as it is."""
        scalar = params.dtype.type
        rate = scalar(lr * share / (1 + state.steps * self.lr_decay))
        state.steps += share
        scratch = np.empty((2, min(len(params), BLOCK)), params.dtype)
        for part in blocks(len(params)):
            w, g, s = params[part], gradient[part], state.slots["square_sum"][part]
            first, second = scratch[:, : len(w)]
            if self.weight_decay:
                np.multiply(w, scalar(self.weight_decay), out=first)
                np.add(first, g, out=first)
                g = first
            np.multiply(g, g, out=second)
            if share != 1:
                np.multiply(second, scalar(share), out=second)
            np.add(s, second, out=s)
            np.sqrt(s, out=second)
            np.add(second, scalar(self.eps), out=second)
            np.divide(g, second, out=second)
            np.multiply(second, rate, out=second)
            np.subtract(w, second, out=w)
