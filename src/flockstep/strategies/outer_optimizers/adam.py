"""Adam as outer optimizer: Adam takes a step along the mean change of the replicas."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flockstep.arrays.namespace import namespace
from flockstep.arrays.schema import FlatArray
from flockstep.errors import require
from flockstep.optimizers.base import OptimizerState, require_visible
from flockstep.strategies.outer_optimizers.base import OuterOptimizer


@dataclass(frozen=True)
class OuterAdam(OuterOptimizer):
    """Adam as outer optimizer (FedAdam: Reddi et al. 2021, algorithm 2).

    With Delta = mean_i theta_i - theta: m ← beta1 m + (1 - beta1) Delta, v ← beta2 v + (1 - beta2) Delta², theta ←
    theta + lr m / (sqrt(v) + eps), starting from m = 0 and v = eps². Unlike in the optimizer adam, the bias of m and v
    is not corrected. `eps` is the paper's tau, the degree of adaptivity: if Delta is much larger than eps, every
    element moves by about lr whatever the size of Delta.
    """

    lr: float = 0.3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 0.1

    def __post_init__(self) -> None:
        require(0 <= self.lr < math.inf, "lr of outer adam", ">= 0 and finite", self.lr, "use for example 0.3")
        require(0 <= self.beta1 < 1, "beta1 of outer adam", "in [0, 1)", self.beta1, "use for example 0.9")
        require(0 <= self.beta2 < 1, "beta2 of outer adam", "in [0, 1)", self.beta2, "use for example 0.99")
        require(0 < self.eps < math.inf, "eps of outer adam", "> 0 and finite", self.eps, "use for example 0.1")

    def start(self, model: FlatArray, workers: int) -> OptimizerState:
        require_visible(self.eps, model)
        xp = namespace(model)
        return OptimizerState(slots={"mean": xp.zeros_like(model), "square": xp.full_like(model, self.eps**2)})

    def move(self, model: FlatArray, mean: FlatArray, state: OptimizerState) -> None:
        m, v = state.slots["mean"], state.slots["square"]
        delta = mean - model
        m *= self.beta1
        m += (1 - self.beta1) * delta
        self.add_square(v, delta * delta)
        model += self.lr * m / (namespace(v).sqrt(v) + self.eps)

    def add_square(self, v: FlatArray, square: FlatArray) -> None:
        """Add the square of the mean change (K,) to `v`, in place."""
        v *= self.beta2
        v += (1 - self.beta2) * square


@dataclass(frozen=True)
class OuterYogi(OuterAdam):
    """Yogi as outer optimizer (FedYogi: Reddi et al. 2021, algorithm 2): as OuterAdam, with v ← v - (1 - beta2) Delta²
    sign(v - Delta²), so that v falls slowly after large changes.
    """

    def add_square(self, v: FlatArray, square: FlatArray) -> None:
        v -= (1 - self.beta2) * square * namespace(v).sign(v - square)


@dataclass(frozen=True)
class OuterAdagrad(OuterAdam):
    """Adagrad as outer optimizer (FedAdagrad: Reddi et al. 2021, algorithm 2): as OuterAdam, with v ← v + Delta².
    `beta2` is not used; the paper's experiments set beta1 = 0.
    """

    beta1: float = 0.0

    def add_square(self, v: FlatArray, square: FlatArray) -> None:
        v += square
