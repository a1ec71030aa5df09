"""Optimizers on flat arrays, with the same arithmetic on a worker and, if elementwise, on a server or a slice."""

from flockstep.optimizers.base import Optimizer, OptimizerState

__all__ = ["Optimizer", "OptimizerState"]
