"""Blockwise model-update filtering: momentum over blocks of local steps."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.arrays.namespace import copied, namespace
from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError, require
from flockstep.strategies.outer_optimizers.base import OuterOptimizer


@dataclass
class Blocks:
    """The filter's state: the model W_t (K,), its last change Delta_t (K,), and the block momentum eta."""

    model: FlatArray
    change: FlatArray
    momentum: float


@dataclass(frozen=True)
class Bmuf(OuterOptimizer):
    """Incremental block training with blockwise model-update filtering (Chen & Huo 2016, section 2).

    With G = mean_i w_i - W_g: Delta ← eta Delta + zeta G, W ← W + Delta. Replicas continue from W_g = W (classical
    block momentum), or with `nesterov` from W_g = W + eta Delta; the result is W in both cases. The block momentum eta
    is 1 - 1/n by default. `reset` zeroes the workers' own momentum after every block, as CNTK's resetSGDMomentum does.
    With eta = 0 and zeta = 1 the filter equals plain averaging, up to rounding.
    """

    momentum: float | None = None
    zeta: float = 1.0
    nesterov: bool = False
    reset: bool = False

    def __post_init__(self) -> None:
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ConfigurationError(
                f"momentum of bmuf must be in [0, 1), got {self.momentum}; leave it out for 1 - 1 / workers"
            )
        require(0 < self.zeta < float("inf"), "zeta of bmuf", "> 0 and finite", self.zeta, "1 is usual")

    @property
    def resets(self) -> bool:
        return self.reset

    def start(self, model: FlatArray, workers: int) -> Blocks:
        return Blocks(copied(model), namespace(model).zeros_like(model), self._momentum(workers))

    def resize(self, state: Blocks, workers: int) -> None:
        state.momentum = self._momentum(workers)

    def _momentum(self, workers: int) -> float:
        return 1 - 1 / workers if self.momentum is None else self.momentum

    def move(self, model: FlatArray, mean: FlatArray, state: Blocks) -> None:
        eta = state.momentum
        state.change *= eta
        state.change += self.zeta * (mean - model)
        state.model += state.change
        model[:] = state.model
        if self.nesterov:
            model += eta * state.change

    def result(self, model: FlatArray, state: Blocks) -> FlatArray:
        """Return the model W, not the look-ahead point W + eta Delta from which replicas continue."""
        return state.model
