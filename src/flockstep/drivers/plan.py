"""What a driver is told: the resolved choices of one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.frameworks.base import Indices
from flockstep.messages import Address
from flockstep.nodes import Cluster
from flockstep.optimizers.base import Optimizer
from flockstep.strategies.base import ResultPolicy, Strategy


@dataclass(frozen=True, eq=False)
class Plan:
    """One run: strategy, cluster, budget and seed. `parts[rank]` are the training samples of a worker."""

    strategy: Strategy
    cluster: Cluster
    optimizer: Optimizer
    parts: Sequence[Indices]
    batch: int
    steps: int
    seed: int
    result: ResultPolicy
    evaluate_every: int
    """Steps per worker between two evaluations of the model, which happen off the clock."""

    def random(self, address: Address) -> np.random.Generator:
        """The node's own stream, for what its strategy draws."""
        return np.random.default_rng(np.random.SeedSequence((self.seed, 0x5747, address + (1 << 31))))


class LocalOptimizer:
    """A worker's optimiser: an `Optimizer` with the state of one replica."""

    def __init__(self, optimizer: Optimizer, params: FlatArray):
        self.lr = optimizer.lr
        self._optimizer = optimizer
        self.state = optimizer.init(params)

    def step(self, params: FlatArray, gradient: FlatArray) -> None:
        """Update `params` in place."""
        self._optimizer.step(params, gradient, self.state, self.lr)
