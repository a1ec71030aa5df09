"""One network with one hidden layer in numpy, PyTorch and JAX: equal parameters, data and loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.numpy import Model, Views, cross_entropies, cross_entropy

SHAPES = {"hidden.weight": (6, 5), "hidden.bias": (6,), "out.weight": (3, 6), "out.bias": (3,)}
"""Shapes of the parameters, in the layout and the order of `torch.nn.Linear`."""


def start() -> dict[str, FlatArray]:
    random = np.random.default_rng(7)
    return {name: 0.5 * random.normal(size=shape) for name, shape in SHAPES.items()}


def data() -> Data:
    random = np.random.default_rng(1)
    x = random.normal(size=(96, 5))
    y = (x[:, :3] + 0.3 * random.normal(size=(96, 3))).argmax(1)
    return Data(x[:64], y[:64], x[64:], y[64:])


class Perceptron(Model):
    """x → tanh(x V' + a) W' + b, with cross-entropy, its gradient and the factors of the gradient by hand."""

    dtype = "float64"

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return SHAPES

    def initial(self, random: np.random.Generator) -> Views:
        return start()

    def gradients(self, params: Views, x: FlatArray, y: FlatArray, out: Views) -> FlatArray:
        losses, layers = self._layers(params, x, y)
        for name, (slope, before) in layers.items():
            np.matmul(slope.transpose(0, 2, 1), before, out=out[f"{name}.weight"])
            np.sum(slope, axis=1, out=out[f"{name}.bias"])
        return losses

    def factors(self, params: Views, x: FlatArray, y: FlatArray) -> Mapping[str, tuple[FlatArray, FlatArray]]:
        _, layers = self._layers({name: each[None] for name, each in params.items()}, x[None], y[None])
        return {f"{name}.weight": (slope[0], before[0]) for name, (slope, before) in layers.items()}

    def _layers(
        self, params: Views, x: FlatArray, y: FlatArray
    ) -> tuple[FlatArray, dict[str, tuple[FlatArray, FlatArray]]]:
        """Losses, and the gradients of each layer's outputs with the layer's inputs."""
        weights = params["hidden.weight"].transpose(0, 2, 1), params["out.weight"]
        hidden = np.tanh(x @ weights[0] + params["hidden.bias"][:, None])
        losses, error = cross_entropies(hidden @ weights[1].transpose(0, 2, 1) + params["out.bias"][:, None], y)
        return losses, {"hidden": ((error @ weights[1]) * (1 - hidden**2), x), "out": (error, hidden)}

    def outputs(self, params: Views, x: FlatArray) -> FlatArray:
        hidden = np.tanh(x @ params["hidden.weight"].T + params["hidden.bias"])
        outputs: FlatArray = hidden @ params["out.weight"].T + params["out.bias"]
        return outputs

    def loss(self, params: Views, outputs: FlatArray, y: FlatArray) -> float:
        return cross_entropy(outputs, y)


def in_torch() -> dict[str, Any]:
    import torch
    from torch import nn

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.out = nn.Linear(5, 6), nn.Linear(6, 3)
            self.double().load_state_dict({name: torch.tensor(value) for name, value in start().items()})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = self.out(torch.tanh(self.hidden(x)))
            return outputs

    return {"model": Network, "loss": nn.functional.cross_entropy}


def in_jax() -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    from flockstep.frameworks.jax import JaxModel

    def apply(params: Any, x: Any) -> Any:
        v, a, w, b = params
        return jnp.tanh(x @ v.T + a) @ w.T + b

    def loss(outputs: Any, y: Any) -> Any:
        return -jnp.take_along_axis(jax.nn.log_softmax(outputs), y[:, None], 1).mean()

    return {"model": lambda: JaxModel(lambda key: list(start().values()), apply), "loss": loss}


FRAMEWORKS: dict[str, Callable[[], dict[str, Any]]] = {
    "numpy": lambda: {"model": Perceptron},
    "torch": in_torch,
    "jax": in_jax,
}


def job(framework: str, batch: int = 8) -> Job:
    """The job in one framework; float64, so that what differs is rounding and nothing else."""
    return Job(data=data, optimizer="sgd(lr=0.2)", batch=batch, **FRAMEWORKS[framework]())
