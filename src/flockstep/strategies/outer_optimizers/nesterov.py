"""DiLoCo's outer optimizer: SGD with Nesterov momentum along the mean change of the replicas."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.arrays.schema import FlatArray
from flockstep.optimizers.base import OptimizerState
from flockstep.optimizers.sgd import SGD
from flockstep.strategies.outer_optimizers.base import OuterOptimizer


@dataclass(frozen=True)
class Nesterov(OuterOptimizer):
    """DiLoCo's outer optimizer (Douillard et al. 2023, section 2 and algorithm 1): SGD with Nesterov momentum.

    With Delta = theta - mean_i theta_i: v ← momentum v + Delta, theta ← theta - lr (Delta + momentum v), PyTorch's form
    of Nesterov momentum, as in the authors' code. lr = 1 and momentum = 0 give the mean, up to rounding.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        self.optimizer()

    def optimizer(self) -> SGD:
        """Return the SGD optimizer that takes Delta, the change of the model, as its gradient."""
        return SGD(self.lr, self.momentum, nesterov=self.momentum > 0)

    def start(self, model: FlatArray, workers: int) -> OptimizerState:
        return self.optimizer().init(model)

    def move(self, model: FlatArray, mean: FlatArray, state: OptimizerState) -> None:
        self.optimizer().step(model, model - mean, state, self.lr)
