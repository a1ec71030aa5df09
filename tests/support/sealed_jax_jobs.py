"""JAX jobs that are sealed in tests: a CNN with noise, and a recurrent network over text, with a metric of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from flockstep.frameworks.base import Job
from flockstep.frameworks.jax import JaxModel
from support.sealed_data import LENGTH, WORDS, image_data, text_data

SECRET_WIDTH = 12


def secret_images(secret_key: Any) -> dict[str, Any]:
    first, second = jax.random.split(secret_key)
    return {
        "secret_filters": 0.3 * jax.random.normal(first, (4, 1, 3, 3)),
        "hidden_output": {"secret_matrix": 0.3 * jax.random.normal(second, (36, 10)), "secret_bias": jnp.zeros(10)},
    }


@jax.jit
def hidden_convolution(secret_image: Any, secret_filters: Any) -> Any:
    return jax.nn.relu(jax.lax.conv_general_dilated(secret_image, secret_filters, (1, 1), "VALID"))


def secret_network(params: Any, secret_image: Any, secret_noise: Any) -> Any:
    found = hidden_convolution(secret_image, params["secret_filters"])
    found = jax.lax.reduce_window(found, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    found = found.reshape(found.shape[0], -1)
    if secret_noise is not None:
        found = found * jax.random.bernoulli(secret_noise, 0.8, found.shape) / 0.8
    return found @ params["hidden_output"]["secret_matrix"] + params["hidden_output"]["secret_bias"]


def hidden_recurrence(secret_key: Any) -> dict[str, Any]:
    keys = jax.random.split(secret_key, 3)
    return {
        "secret_embedding": 0.5 * jax.random.normal(keys[0], (WORDS, SECRET_WIDTH)),
        "secret_transition": [0.3 * jax.random.normal(keys[1], (SECRET_WIDTH, SECRET_WIDTH)) for _ in range(11)],
        "secret_words": 0.3 * jax.random.normal(keys[2], (SECRET_WIDTH, WORDS)),
    }


def secret_reader(params: Any, token_numbers: Any) -> Any:
    def secret_step(state: Any, token: Any) -> Any:
        state = jnp.tanh(state @ sum(params["secret_transition"]) + token)
        return state, state

    embedded = params["secret_embedding"][token_numbers].transpose(1, 0, 2)
    states = jax.lax.scan(secret_step, jnp.zeros(embedded.shape[1:]), embedded)[1]
    return states.transpose(1, 0, 2) @ params["secret_words"]


def secret_entropy(outputs: Any, targets: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(outputs), targets[..., None], -1).mean()


def nats_per_token(outputs: Any, targets: Any) -> Any:
    return secret_entropy(outputs, targets) * jnp.ones(LENGTH).sum() / LENGTH


def images() -> Job:
    model = JaxModel(secret_images, secret_network, random=True)
    return Job(lambda: model, image_data, "sgd(lr=0.1, momentum=0.9)", secret_entropy, batch=16)


def reader() -> Job:
    model = JaxModel(hidden_recurrence, secret_reader)
    return Job(
        lambda: model, text_data, "adam(lr=0.01)", secret_entropy, nats_per_token, higher_is_better=False, batch=16
    )


JAX_JOBS: dict[str, Callable[[], Job]] = {"images": images, "reader": reader}
