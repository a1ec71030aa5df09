"""An optimizer that clips the gradient before another optimizer's step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from flockstep.arrays.schema import FlatArray
from flockstep.errors import require
from flockstep.expression import SHOWN
from flockstep.optimizers.base import Optimizer, OptimizerState, norm
from flockstep.optimizers.sgd import SGD


@dataclass(frozen=True)
class Clipped(Optimizer):
    """Gradient clipping (Pascanu, Mikolov & Bengio 2013): a step of `optimizer` along g · min(1, max_norm / (‖g‖ +
    1e-6)).

    ‖g‖ is the Euclidean norm of the whole gradient, so that no slice of the parameters can be stepped alone. The
    learning rate and the state are those of `optimizer`.
    """

    elementwise: ClassVar[bool] = False

    optimizer: Optimizer = field(default_factory=SGD, metadata=SHOWN)
    max_norm: float = 1.0

    def __post_init__(self) -> None:
        require(self.max_norm > 0, "max_norm of clipped", "> 0", self.max_norm, "use for example 1")

    @property
    def lr(self) -> float:  # type: ignore[override]
        """Learning rate of the wrapped optimizer."""
        return self.optimizer.lr

    def load(self) -> None:
        self.optimizer.load()

    def init(self, params: FlatArray) -> OptimizerState:
        return self.optimizer.init(params)

    def remembered(self, state: OptimizerState) -> OptimizerState:
        return self.optimizer.remembered(state)

    def recall(self, params: FlatArray, state: OptimizerState, given: OptimizerState) -> None:
        self.optimizer.recall(params, state, given)

    def step(
        self, params: FlatArray, gradient: FlatArray, state: OptimizerState, lr: float, share: float = 1.0
    ) -> None:
        self.optimizer.step(params, self.scaled(gradient, norm(gradient)), state, lr, share)

    def scaled(self, gradient: FlatArray, length: float) -> FlatArray:
        """Return the gradient, or a slice of it, scaled for clipping; `length` is the norm of the whole gradient."""
        scale = self.max_norm / (length + 1e-6)
        return gradient * scale if scale < 1 or math.isnan(scale) else gradient
