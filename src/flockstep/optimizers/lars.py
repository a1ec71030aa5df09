"""LARS: layer-wise adaptive rate scaling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from flockstep.arrays.namespace import namespace
from flockstep.arrays.schema import FlatArray
from flockstep.errors import require
from flockstep.optimizers.base import Optimizer, OptimizerState, layers_of, norm


@dataclass(frozen=True)
class LARS(Optimizer):
    """Layer-wise adaptive rate scaling (You, Gitman & Ginsburg 2017, algorithm 1); one tensor is one layer.

    For each layer λ = trust ||w|| / (||g|| + weight_decay ||w||), v ← momentum v + lr λ (g + weight_decay w) and w ← w
    - v. The paper does not define λ for layers of norm 0 (biases at the start); here ||w|| / ||g|| counts as 1 for
    them. Because v contains the learning rate, v is multiplied by lr / (lr of the previous step) when the rate changes
    (momentum correction: Goyal et al. 2017, remark 2); momentum_correction=False is algorithm 1 without this
    correction. Slots: `momentum` (v).
    """

    elementwise: ClassVar[bool] = False

    lr: float = 1.0
    momentum: float = 0.9
    weight_decay: float = 0.0
    trust: float = 0.001
    momentum_correction: bool = True

    def __post_init__(self) -> None:
        require(0 <= self.lr < math.inf, "lr of lars", ">= 0 and finite", self.lr, "use for example 1")
        require(0 <= self.momentum < 1, "momentum of lars", "in [0, 1)", self.momentum, "use 0 for none")
        decays = 0 <= self.weight_decay < math.inf
        require(decays, "weight_decay of lars", ">= 0 and finite", self.weight_decay, "use 0 for none")
        require(0 < self.trust < math.inf, "trust of lars", "> 0 and finite", self.trust, "use for example 0.001")

    def init(self, params: FlatArray) -> OptimizerState:
        """Return the initial state for `params`, of shape (K,); the caller sets its `tensors`."""
        return OptimizerState(slots={"momentum": namespace(params).zeros_like(params)})

    def step(
        self, params: FlatArray, gradient: FlatArray, state: OptimizerState, lr: float, share: float = 1.0
    ) -> None:
        """Update `params` and `state` in place, layer by layer; `gradient` does not change.

        Raises:
            CompositionError: `params` are not the parameters of a whole model.
        """
        lr, share = float(lr), float(share)
        corrects = self.momentum_correction and state.lr > 0
        momentum = self.momentum * (lr / state.lr if corrects else 1.0)
        for part in layers_of(params, state, "lars"):
            w, g, v = params[part], gradient[part], state.slots["momentum"][part]
            rate = lr * share * self._local_rate(norm(w), norm(g))
            v *= momentum
            v += rate * (g + self.weight_decay * w if self.weight_decay else g)
            w -= v
        state.steps += share
        state.lr = lr

    def _local_rate(self, weights: float, slopes: float) -> float:
        """Return λ of a layer, from the norms of its weights and of its gradient."""
        if weights == 0 or slopes == 0:
            return self.trust
        return self.trust * weights / (slopes + self.weight_decay * weights)
