"""A network with one hidden layer as JAX functions, and jobs and data for it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.jax import JaxModel


def init(key: Any) -> dict[str, Any]:
    first, second = jax.random.split(key)
    return {
        "hidden": {"w": 0.5 * jax.random.normal(first, (4, 6)), "b": jnp.zeros(6)},
        "out": {"w": 0.5 * jax.random.normal(second, (6, 3)), "b": jnp.zeros(3)},
    }


def apply(params: Any, x: Any) -> Any:
    hidden = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["out"]["w"] + params["out"]["b"]


def apply_with_noise(params: Any, x: Any, key: Any) -> Any:
    outputs = apply(params, x)
    return outputs if key is None else outputs + 0.1 * jax.random.normal(key, outputs.shape)


def cross_entropy(outputs: Any, y: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(outputs), y[:, None], 1).mean()


def squares(outputs: Any, y: Any) -> Any:
    return jnp.mean((outputs - y) ** 2)


def data() -> Data:
    random = np.random.default_rng(1)
    x = random.normal(size=(60, 4)).astype("float32")
    y = x[:, :3].argmax(1)
    return Data(x[:40], y[:40], x[40:], y[40:])


def job(**changed: Any) -> Job:
    settings = {"model": lambda: JaxModel(init, apply), "data": data, "optimizer": "sgd(lr=0.1)", "batch": 8}
    return Job(**(settings | {"loss": cross_entropy} | changed))
