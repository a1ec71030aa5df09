"""One network with one hidden layer in numpy, PyTorch and JAX: equal parameters, data and loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.numpy import Model, Views, cross_entropies, cross_entropy

SHAPES = {"b1": (6,), "b2": (3,), "w1": (5, 6), "w2": (6, 3)}
"""Names in alphabetical order, as JAX orders the entries of a dict."""


def start() -> dict[str, FlatArray]:
    random = np.random.default_rng(7)
    return {name: 0.5 * random.normal(size=shape) for name, shape in SHAPES.items()}


def data() -> Data:
    random = np.random.default_rng(1)
    x = random.normal(size=(96, 5))
    y = (x[:, :3] + 0.3 * random.normal(size=(96, 3))).argmax(1)
    return Data(x[:64], y[:64], x[64:], y[64:])


class Perceptron(Model):
    """x → tanh(x W1 + b1) W2 + b2, with cross-entropy, and its gradient by hand."""

    dtype = "float64"

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return SHAPES

    def initial(self, random: np.random.Generator) -> Views:
        return start()

    def gradients(self, params: Views, x: FlatArray, y: FlatArray, out: Views) -> FlatArray:
        hidden = np.tanh(x @ params["w1"] + params["b1"][:, None])
        losses, error = cross_entropies(hidden @ params["w2"] + params["b2"][:, None], y)
        back = (error @ params["w2"].transpose(0, 2, 1)) * (1 - hidden**2)
        for name, before, slope in (("1", x, back), ("2", hidden, error)):
            np.matmul(before.transpose(0, 2, 1), slope, out=out["w" + name])
            np.sum(slope, axis=1, out=out["b" + name])
        return losses

    def outputs(self, params: Views, x: FlatArray) -> FlatArray:
        hidden = np.tanh(x @ params["w1"] + params["b1"])
        outputs: FlatArray = hidden @ params["w2"] + params["b2"]
        return outputs

    def loss(self, params: Views, outputs: FlatArray, y: FlatArray) -> float:
        return cross_entropy(outputs, y)


def in_torch() -> dict[str, Any]:
    import torch
    from torch import nn

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, value in start().items():
                self.register_parameter(name, nn.Parameter(torch.tensor(value)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x @ self.w1 + self.b1) @ self.w2 + self.b2

    return {"model": Network, "loss": nn.functional.cross_entropy}


def in_jax() -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    from flockstep.frameworks.jax import JaxModel

    def apply(params: Any, x: Any) -> Any:
        return jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]

    def loss(outputs: Any, y: Any) -> Any:
        return -jnp.take_along_axis(jax.nn.log_softmax(outputs), y[:, None], 1).mean()

    return {"model": lambda: JaxModel(lambda key: start(), apply), "loss": loss}


FRAMEWORKS: dict[str, Callable[[], dict[str, Any]]] = {
    "numpy": lambda: {"model": Perceptron},
    "torch": in_torch,
    "jax": in_jax,
}


def job(framework: str) -> Job:
    """The job in one framework; float64, so that what differs is rounding and nothing else."""
    return Job(data=data, optimizer="sgd(lr=0.2)", batch=8, **FRAMEWORKS[framework]())
