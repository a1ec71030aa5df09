"""A workload with a noisy quadratic function in numpy, for which errors can be computed by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flockstep.frameworks import numpy as numpy_framework
from flockstep.frameworks.base import Data, Job
from flockstep.optimizers.base import Optimizer
from flockstep.optimizers.sgd import SGD
from flockstep.workloads.base import Workload, generator, require_at_least, tuned_job


@dataclass(frozen=True)
class Quadratic(Workload):
    """Minimize the mean of ½ (w - x)ᵀ H (w - x) over samples x around a random optimum; needs only numpy.

    H is diagonal, with entries evenly spaced in the logarithm from 1 / condition to 1; the samples have standard
    deviation `noise` in each dimension. The single test sample is the samples' mean, so the test loss is the distance
    from the smallest possible loss, and the metric is the mean squared distance from the optimum; both are 0 at best.
    """

    batch: int = 16
    epochs: float = 6.0
    optimizer: Optimizer = SGD(lr=0.1)
    target: float = 0.01
    dimension: int = 100
    condition: float = 10.0
    noise: float = 1.0
    train: int = 2048
    data_seed: int = 0

    def __post_init__(self) -> None:
        require_at_least(1, dimension=self.dimension, condition=self.condition, train=self.train)
        require_at_least(0, noise=self.noise, data_seed=self.data_seed)

    def job(self, seed: int) -> Job:
        """Return the job, whose initial parameters are drawn from the standard normal distribution."""
        return tuned_job(
            self,
            "quadratic",
            model=lambda: numpy_framework.QuadraticModel(np.geomspace(1 / self.condition, 1, self.dimension)),
            data=self._data,
            metric=squared_distance,
            higher_is_better=False,
            least_steps=190,
        )

    def _data(self) -> Data:
        rng = generator("quadratic", self.data_seed)
        optimum = rng.standard_normal(self.dimension)
        x = optimum + self.noise * rng.standard_normal((self.train, self.dimension))
        # Integer targets would be taken for classes.
        return Data(
            x.astype(np.float32),
            np.zeros(self.train, np.float32),
            x.mean(0, keepdims=True).astype(np.float32),
            np.zeros(1, np.float32),
        )


def squared_distance(outputs: Any, targets: Any) -> float:
    """Return the mean of the squares of `outputs`, which are parameters minus samples. `targets` are not used."""
    return float(np.mean(np.square(outputs, dtype=np.float64)))
