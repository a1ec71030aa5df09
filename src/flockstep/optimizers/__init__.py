"""Optimizers on flat arrays: the same arithmetic on a worker and, if elementwise, on a server and on a shard."""

from flockstep.optimizers.base import Optimizer, OptimizerState

__all__ = ["Optimizer", "OptimizerState"]
