"""LAMB: Adam's direction, scaled in each layer by the norm of the layer's weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from flockstep.arrays.namespace import namespace
from flockstep.arrays.schema import FlatArray
from flockstep.errors import require
from flockstep.optimizers.adam import AdaptiveMoments
from flockstep.optimizers.base import OptimizerState, layers_of, norm


@dataclass(frozen=True)
class LAMB(AdaptiveMoments):
    """Layer-wise adaptive moments (You et al. 2020, algorithm 2); one tensor is one layer.

    m ← beta1 m + (1 - beta1) g, v ← beta2 v + (1 - beta2) g², u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
    + weight_decay w, and w ← w - lr φ(||w||) / ||u|| u for each layer, with φ(z) = min(z, largest). If ||w|| or ||u||
    is 0 the ratio counts as 1, as in the authors' code. A share of a full step is as in `adam`. Slots: `mean` (m) and
    `square` (v).
    """

    elementwise: ClassVar[bool] = False

    eps: float = 1e-6
    weight_decay: float = 0.01
    largest: float = math.inf

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.largest > 0, "largest of lamb", "> 0", self.largest, "use inf for no bound")

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
