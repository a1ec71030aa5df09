"""A workload with linear classification of a Gaussian mixture in plain numpy; needs no other package."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flockstep.frameworks import numpy as numpy_framework
from flockstep.frameworks.base import Data, Job
from flockstep.optimizers.base import Optimizer
from flockstep.optimizers.sgd import SGD
from flockstep.workloads.base import Workload, generator, require_at_least, tuned_job


@dataclass(frozen=True)
class Softmax(Workload):
    """Softmax regression on overlapping Gaussian clouds, one per class; needs only numpy.

    The centers lie `spread` standard deviations from the origin. Features are scaled by factors from 1 / condition to
    1, evenly spaced in the logarithm, which does not change the best accuracy, but slows down every gradient method.
    """

    batch: int = 16
    epochs: float = 6.0
    optimizer: Optimizer = SGD(lr=1.0)
    target: float = 0.9
    features: int = 20
    classes: int = 10
    spread: float = 3.75
    condition: float = 8.0
    train: int = 4096
    test: int = 1024
    l2: float = 0.0
    data_seed: int = 0

    def __post_init__(self) -> None:
        require_at_least(1, features=self.features, train=self.train, test=self.test)
        require_at_least(1, condition=self.condition)
        require_at_least(2, classes=self.classes)
        require_at_least(0, spread=self.spread, l2=self.l2, data_seed=self.data_seed)

    def job(self, seed: int) -> Job:
        """Return the job, in which every replica starts at zero, whatever the seed of the run."""
        return tuned_job(
            self,
            "softmax",
            model=lambda: numpy_framework.SoftmaxRegression(self.features, self.classes, self.l2),
            data=self._data,
            least_steps=380,
        )

    def _data(self) -> Data:
        rng, count = generator("softmax", self.data_seed), self.train + self.test
        centers = rng.standard_normal((self.classes, self.features))
        centers *= self.spread / np.linalg.norm(centers, axis=1, keepdims=True)
        labels = rng.permutation(np.arange(count) % self.classes).astype(np.int64)
        x = centers[labels] + rng.standard_normal((count, self.features))
        x = (x * np.geomspace(1 / self.condition, 1, self.features)).astype(np.float32)
        return Data(x[: self.train], labels[: self.train], x[self.train :], labels[self.train :])
