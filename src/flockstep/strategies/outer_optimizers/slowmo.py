"""SlowMo, slow momentum: heavy-ball momentum over the mean changes of the replicas."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flockstep.arrays.namespace import namespace
from flockstep.arrays.schema import FlatArray
from flockstep.errors import require
from flockstep.nodes import Worker
from flockstep.strategies.outer_optimizers.base import OuterOptimizer


@dataclass
class SlowVelocity:
    """SlowMo's state: the velocity γ u (K,), and the workers' learning rate γ at the last average; 0 before it."""

    velocity: FlatArray
    lr: float = 0.0


@dataclass(frozen=True)
class SlowMo(OuterOptimizer):
    """Slow momentum (SlowMo: Wang, Tantia, Ballas & Rabbat 2020, algorithm 1).

    With the model x that the replicas started from and γ, the workers' learning rate at the average: u ← beta u + (x -
    mean_i x_i) / γ, x ← x - alpha γ u. The state holds v = γ u, so that v ← beta (γ / previous γ) v + (x - mean_i x_i),
    x ← x - alpha v. On a server (`fedavg`), which has no learning rate, v is not rescaled when γ changes: FedAvgM (Hsu,
    Qi & Brown 2019). `reset` resets the workers' own optimizers after every average; without it, each worker maintains
    its buffers. beta = 0 and alpha = 1 give the mean, up to rounding.
    """

    alpha: float = 1.0
    beta: float = 0.6
    reset: bool = False

    def __post_init__(self) -> None:
        require(0 < self.alpha < math.inf, "alpha of slowmo", "> 0 and finite", self.alpha, "1 is usual")
        require(0 <= self.beta < 1, "beta of slowmo", "in [0, 1)", self.beta, "0.4 to 0.8 is usual")

    @property
    def resets(self) -> bool:
        return self.reset

    def start(self, model: FlatArray, workers: int) -> SlowVelocity:
        return SlowVelocity(namespace(model).zeros_like(model))

    def follow(self, me: Worker, state: SlowVelocity) -> None:
        """Rescale the velocity when the learning rate of the worker changes.

        Raises:
            ConfigurationError: the learning rate belongs to another library's optimizer and cannot be read.
        """
        if state.lr not in (0, me.lr):
            state.velocity *= me.lr / state.lr
        state.lr = me.lr

    def move(self, model: FlatArray, mean: FlatArray, state: SlowVelocity) -> None:
        state.velocity *= self.beta
        state.velocity += model - mean
        model -= self.alpha * state.velocity
