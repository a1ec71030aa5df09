"""A step of Adam along the way that the replicas went."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.arrays.schema import FlatArray
from flockstep.optimizers.adam import Adam
from flockstep.optimizers.base import OptimizerState
from flockstep.strategies.outer.base import Outer


@dataclass(frozen=True)
class OuterAdam(Outer):
    """Adam as outer optimiser (Reddi et al. 2021: FedAdam; one of DiLoCo's, Douillard et al. 2023, section 3.2).

    Delta = theta - mean_i theta_i is its gradient. It needs an eps that is large beside the root of the mean square of
    Delta, or every element moves by lr whatever the replicas did.
    """

    lr: float = 0.3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 0.1

    def __post_init__(self) -> None:
        self.optimizer()

    def optimizer(self) -> Adam:
        """The optimiser that is handed Delta as a gradient."""
        return Adam(self.lr, self.beta1, self.beta2, self.eps)

    def start(self, model: FlatArray, workers: int) -> OptimizerState:
        """No moments."""
        return self.optimizer().init(model)

    def move(self, model: FlatArray, mean: FlatArray, state: OptimizerState) -> None:
        """Step along Delta."""
        self.optimizer().step(model, model - mean, state, self.lr)
