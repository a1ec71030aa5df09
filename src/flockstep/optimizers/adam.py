"""Adam, and Adam with decoupled weight decay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from flockstep.arrays.namespace import namespace
from flockstep.arrays.schema import FlatArray
from flockstep.errors import require
from flockstep.optimizers.base import BLOCK, Optimizer, OptimizerState, blocks, require_visible


@dataclass(frozen=True)
class AdaptiveMoments(Optimizer):
    """An optimizer with running means of the gradient and of its square. Slots: `mean` and `square`."""

    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        who, eps = type(self).__name__.lower(), type(self).eps
        require(0 <= self.lr < math.inf, f"lr of {who}", ">= 0 and finite", self.lr, "use for example 0.001")
        require(0 <= self.beta1 < 1, f"beta1 of {who}", "in [0, 1)", self.beta1, "use for example 0.9")
        require(0 <= self.beta2 < 1, f"beta2 of {who}", "in [0, 1)", self.beta2, "use for example 0.999")
        require(0 < self.eps < math.inf, f"eps of {who}", "> 0 and finite", self.eps, f"use for example {eps:g}")
        decays = 0 <= self.weight_decay < math.inf
        require(decays, f"weight_decay of {who}", ">= 0 and finite", self.weight_decay, "use 0 for none")

    def init(self, params: FlatArray) -> OptimizerState:
        """Return the initial state for `params`, of shape (K,).

        Raises:
            ConfigurationError: eps is zero in the dtype of `params`.
        """
        require_visible(self.eps, params)
        xp = namespace(params)
        return OptimizerState(slots={"mean": xp.zeros_like(params), "square": xp.zeros_like(params)})


@dataclass(frozen=True)
class Adam(AdaptiveMoments):
    """Adam (Kingma & Ba 2015); weight decay is added to the gradient.

    With g' = g + weight_decay w at step t = 1, 2, ...: m ← beta1 m + (1 - beta1) g', v ← beta2 v + (1 - beta2) g'², w ←
    w - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps). For a share q of a full step lr is multiplied by q,
    the means keep the fractions beta1^q and beta2^q of their values, and t grows by q. Slots: `mean` (m) and `square`
    (v).
    """

    decoupled: ClassVar[bool] = False
    """Whether weight decay shrinks the parameters directly instead of being added to the gradient."""

    def step(
        self, params: FlatArray, gradient: FlatArray, state: OptimizerState, lr: float, share: float = 1.0
    ) -> None:
        xp, share = namespace(params), float(share)
        state.steps += share
        lr = float(lr) * share
        rate = lr / (1 - self.beta1**state.steps)
        root = math.sqrt(1 - self.beta2**state.steps)
        decay = (1 - lr * self.weight_decay) if self.decoupled else self.weight_decay
        rows = xp.empty_like(params[:BLOCK]), xp.empty_like(params[:BLOCK])
        for part in blocks(len(params)):
            w, g = params[part], gradient[part]
            first, second = (row[: len(w)] for row in rows)
            if self.weight_decay and self.decoupled:
                xp.multiply(w, decay, out=w)
            elif self.weight_decay:
                xp.multiply(w, decay, out=first)
                xp.add(first, g, out=first)
                g = first
            m, v = state.slots["mean"][part], state.slots["square"][part]
            self._average(m, v, g, second, share)
            xp.sqrt(v, out=second)
            xp.divide(second, root, out=second)
            xp.add(second, self.eps, out=second)
            xp.divide(m, second, out=second)
            xp.multiply(second, rate, out=second)
            xp.subtract(w, second, out=w)

    def _average(self, m: FlatArray, v: FlatArray, g: FlatArray, scratch: FlatArray, share: float) -> None:
        """Move both running means toward `g` and its square."""
        xp, beta1, beta2 = namespace(m), self.beta1**share, self.beta2**share
        xp.subtract(g, m, out=scratch)
        xp.multiply(scratch, 1 - beta1, out=scratch)
        xp.add(m, scratch, out=m)
        xp.multiply(v, beta2, out=v)
        xp.multiply(g, g, out=scratch)
        xp.multiply(scratch, 1 - beta2, out=scratch)
        xp.add(v, scratch, out=v)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019): w ← (1 - lr weight_decay) w, then Adam's step."""

    decoupled: ClassVar[bool] = True

    weight_decay: float = 0.01
