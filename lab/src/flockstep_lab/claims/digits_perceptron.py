"""A perceptron for the handwritten digits in plain numpy, for claims that need thousands of runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.numpy import Model, Views, cross_entropies, cross_entropy
from flockstep.workloads.digits import Digits

SIZES = (64, 64, 64, 10)
MEAN_PIXEL = 0.3
"""Mean value of the pixels, which is subtracted from the inputs as in the workload `digits`."""


@dataclass(frozen=True)
class Perceptron(Model):
    """A perceptron: 64 pixels → layers of rectified units → 10 logits, with cross-entropy loss; 8,970 parameters by
    default.
    """

    sizes: tuple[int, ...] = SIZES
    dtype: str = "float32"

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name → shape of the parameters: weights W1, W2, … and biases b1, b2, …."""
        layers = list(enumerate(pairwise(self.sizes), start=1))
        return {name: shape for i, (a, b) in layers for name, shape in ((f"W{i}", (a, b)), (f"b{i}", (b,)))}

    def initial(self, random: np.random.Generator) -> Views:
        """Return normally distributed weights of variance 2 / (inputs + outputs) (Glorot & Bengio 2010), and zero
        biases.
        """
        return {
            name: random.standard_normal(shape) * (2 / sum(shape)) ** 0.5 if len(shape) == 2 else np.zeros(shape)
            for name, shape in self.shapes.items()
        }

    def gradients(self, params: Views, x: FlatArray, y: FlatArray, out: Views) -> FlatArray:
        """Write the gradients, computed by backpropagation, to `out`, and return the losses."""
        inputs, last = [x], len(self.sizes) - 1
        for i in range(1, last):
            inputs.append(np.maximum(inputs[-1] @ params[f"W{i}"] + params[f"b{i}"][:, None, :], 0))
        losses, error = cross_entropies(inputs[-1] @ params[f"W{last}"] + params[f"b{last}"][:, None, :], y)
        for i in range(last, 0, -1):
            np.matmul(inputs[i - 1].transpose(0, 2, 1), error, out=out[f"W{i}"])
            np.sum(error, axis=1, out=out[f"b{i}"])
            if i > 1:
                error = (error @ params[f"W{i}"].transpose(0, 2, 1)) * (inputs[i - 1] > 0)
        return losses

    def outputs(self, params: Views, x: FlatArray) -> FlatArray:
        """Return the logits of N samples, of shape (N, 10)."""
        last = len(self.sizes) - 1
        for i in range(1, last):
            x = np.maximum(x @ params[f"W{i}"] + params[f"b{i}"], 0)
        logits: FlatArray = x @ params[f"W{last}"] + params[f"b{last}"]
        return logits

    def loss(self, params: Views, outputs: FlatArray, y: FlatArray) -> float:
        return cross_entropy(outputs, y)


def digits_job(optimizer: str, batch: int) -> Job:
    """Return the job that classifies handwritten digits: 1,437 training and 360 test samples of 8 × 8 pixels.

    The run's seed determines initial weights and sample order.
    """
    source = Digits().job(0).data

    def data() -> Data:
        its = source()
        train, test = (x.reshape(-1, SIZES[0]) - np.float32(MEAN_PIXEL) for x in (its.train_x, its.test_x))
        return Data(train, its.train_y, test, its.test_y)

    return Job(Perceptron, data, optimizer, batch=batch, name="digits on a perceptron")
