"""The digits as pictures of MNIST's size, on a perceptron with one hidden layer in plain numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.claims.digits_perceptron import digits_job
from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.numpy import Model, Views

SIDE = 28


@dataclass(frozen=True)
class ImagePerceptron(Model):
    """784 pixels → `hidden` rectified units → 10 logits, cross-entropy: 79,510 parameters with 100 units."""

    hidden: int = 100
    dtype: str = "float32"

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """W1, b1, W2, b2."""
        return {"W1": (SIDE * SIDE, self.hidden), "b1": (self.hidden,), "W2": (self.hidden, 10), "b2": (10,)}

    def initial(self, random: np.random.Generator) -> Views:
        """Normal weights of variance 2 / (inputs + outputs), by Glorot & Bengio (2010), no biases."""
        return {
            name: random.standard_normal(shape) * (2 / sum(shape)) ** 0.5 if len(shape) == 2 else np.zeros(shape)
            for name, shape in self.shapes.items()
        }

    def gradients(self, params: Views, x: FlatArray, y: FlatArray, out: Views) -> FlatArray:
        """Backpropagation; every product is a stacked matmul."""
        hidden = np.maximum(x @ params["W1"] + params["b1"][:, None, :], 0)
        log_p = _log_softmax(hidden @ params["W2"] + params["b2"][:, None, :])
        losses: FlatArray = -np.take_along_axis(log_p, y[..., None], axis=2)[:, :, 0].mean(axis=1)
        error = np.exp(log_p)
        error -= y[..., None] == np.arange(10)
        error /= x.dtype.type(x.shape[1])
        np.matmul(hidden.transpose(0, 2, 1), error, out=out["W2"])
        np.sum(error, axis=1, out=out["b2"])
        error = (error @ params["W2"].transpose(0, 2, 1)) * (hidden > 0)
        np.matmul(x.transpose(0, 2, 1), error, out=out["W1"])
        np.sum(error, axis=1, out=out["b1"])
        return losses

    def outputs(self, params: Views, x: FlatArray) -> FlatArray:
        """The logits, (N, 10)."""
        logits: FlatArray = np.maximum(x @ params["W1"] + params["b1"], 0) @ params["W2"] + params["b2"]
        return logits

    def loss(self, params: Views, outputs: FlatArray, y: FlatArray) -> float:
        """The mean cross-entropy."""
        return float(-np.take_along_axis(_log_softmax(outputs), y[:, None], axis=1).mean(dtype=np.float64))


def image_job(optimizer: str, batch: int, hidden: int = 100) -> Job:
    """The digits, every pixel drawn 3 or 4 times in either direction."""
    small = digits_job(optimizer, batch).data
    picture = np.arange(64).reshape(8, 8)[np.ix_(*2 * [np.arange(SIDE) * 8 // SIDE])].ravel()

    def data() -> Data:
        its = small()
        return Data(its.train_x[:, picture], its.train_y, its.test_x[:, picture], its.test_y)

    return Job(lambda: ImagePerceptron(hidden), data, optimizer, batch=batch, name="digits of MNIST's size")


def _log_softmax(logits: FlatArray) -> FlatArray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: FlatArray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
