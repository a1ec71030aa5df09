"""A workload with regression on the outputs of a random network, for which the optimum is known exactly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flockstep.frameworks.base import Data, Job
from flockstep.optimizers.base import Optimizer
from flockstep.optimizers.sgd import SGD
from flockstep.workloads.base import Workload, generator, require_at_least, require_module, tuned_job

GAIN = 1.5
"""Factor on the inputs of the teacher's tanh units, beyond their linear range; the student starts with 1."""


@dataclass(frozen=True)
class Tabular(Workload):
    """Fit a random teacher network with a student of the same shape (9,871 parameters).

    Inputs are standard normal. Labels have mean 0 and variance 1 before noise of variance noise² is added to those of
    the training set. Test labels have no noise, so the metric, their mean squared error relative to their variance, is
    0 for the teacher, which the student can equal.
    """

    batch: int = 32
    epochs: float = 8.0
    optimizer: Optimizer = SGD(lr=0.03)
    target: float = 0.1
    inputs: int = 8
    width: int = 94
    depth: int = 2
    train: int = 8192
    test: int = 1024
    noise: float = 0.0
    data_seed: int = 0

    def __post_init__(self) -> None:
        require_at_least(1, inputs=self.inputs, width=self.width, depth=self.depth, train=self.train, test=self.test)
        require_at_least(0, noise=self.noise, data_seed=self.data_seed)

    def job(self, seed: int) -> Job:
        require_module("torch", "torch", "the workload tabular")
        from flockstep.workloads import models

        return tuned_job(
            self,
            "tabular",
            model=lambda: models.perceptron(seed, self.inputs, self.width, self.depth),
            data=self._data,
            loss=models.squared_error,
            metric=models.relative_squared_error,
            higher_is_better=False,
            least_steps=500,
        )

    def _data(self) -> Data:
        rng = generator("tabular", self.data_seed)
        x = rng.standard_normal((self.train + self.test, self.inputs))
        hidden = x
        for _ in range(self.depth):
            weights = rng.standard_normal((hidden.shape[1], self.width))
            hidden = np.tanh(GAIN * hidden @ weights / np.sqrt(hidden.shape[1]))
        y = hidden @ rng.standard_normal((self.width, 1))
        y = (y - y.mean()) / y.std()  # which only rescales the teacher's last layer
        y[: self.train] += self.noise * rng.standard_normal((self.train, 1))
        x, y = x.astype(np.float32), y.astype(np.float32)
        return Data(x[: self.train], y[: self.train], x[self.train :], y[self.train :])
