"""LAMB: Adam's direction, scaled in each layer by the norm of the layer's weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from flockstep.arrays.namespace import namespace
from flockstep.arrays.schema import FlatArray
from flockstep.optimizers.base import Optimizer, OptimizerState, layers_of, norm, require, require_visible


@dataclass(frozen=True)
class LAMB(Optimizer):
    """Layer-wise adaptive moments (You et al. 2020, algorithm 2); one tensor is one layer.

    m ← beta1 m + (1 - beta1) g, v ← beta2 v + (1 - beta2) g², u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
    + weight_decay w, and w ← w - lr φ(||w||) / ||u|| u for each layer, with φ(z) = min(z, largest). If ||w|| or ||u||
    is 0 the ratio counts as 1, as in the authors' code. A share of a full step is as in `adam`. Slots: `mean` (m) and
    `square` (v).
    """

    elementwise: ClassVar[bool] = False

    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6
    weight_decay: float = 0.01
    largest: float = math.inf

    def __post_init__(self) -> None:
        require(0 <= self.lr < math.inf, "lr of lamb", ">= 0 and finite", self.lr, "use for example 0.001")
        require(0 <= self.beta1 < 1, "beta1 of lamb", "in [0, 1)", self.beta1, "use for example 0.9")
        require(0 <= self.beta2 < 1, "beta2 of lamb", "in [0, 1)", self.beta2, "use for example 0.999")
        require(0 < self.eps < math.inf, "eps of lamb", "> 0 and finite", self.eps, "use for example 1e-6")
        decays = 0 <= self.weight_decay < math.inf
        require(decays, "weight_decay of lamb", ">= 0 and finite", self.weight_decay, "use 0 for none")
        require(self.largest > 0, "largest of lamb", "> 0", self.largest, "use inf for no bound")

    def init(self, params: FlatArray) -> OptimizerState:
        """Return a fresh state for `params`; its `tensors` must still be set.

        Raises:
            ConfigurationError: eps is zero in the dtype of `params`.
        """
        require_visible(self.eps, params)
        xp = namespace(params)
        return OptimizerState(slots={"mean": xp.zeros_like(params), "square": xp.zeros_like(params)})

    def step(
        self, params: FlatArray, gradient: FlatArray, state: OptimizerState, lr: float, share: float = 1.0
    ) -> None:
        """Update `params` and `state` in place, layer by layer; `gradient` does not change.

        Raises:
            CompositionError: `params` are not the parameters of a whole model.
        """
        lr, share = float(lr), float(share)
        layers = layers_of(params, state, "lamb")
        state.steps += share
        for part in layers:
            w, u = params[part], self._direction(params, gradient, state, part, share)
            weights, length = norm(w), norm(u)
            ratio = min(weights, self.largest) / length if weights > 0 and length > 0 else 1.0
            u *= lr * share * ratio
            w -= u

    def _direction(
        self, params: FlatArray, gradient: FlatArray, state: OptimizerState, part: slice, share: float
    ) -> FlatArray:
        """Update both running means, and return u of one layer in new memory."""
        xp, g = namespace(params), gradient[part]
        m, v = state.slots["mean"][part], state.slots["square"][part]
        m += (1 - self.beta1**share) * (g - m)
        v *= self.beta2**share
        v += (1 - self.beta2**share) * (g * g)
        u: FlatArray = xp.sqrt(v / (1 - self.beta2**state.steps))
        u += self.eps
        xp.divide(m / (1 - self.beta1**state.steps), u, out=u)
        if self.weight_decay:
            u += self.weight_decay * params[part]
        return u
