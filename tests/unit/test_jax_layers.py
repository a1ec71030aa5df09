"""The layers of JAX models: what is multiplied with which tensors, and what cannot be counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from flockstep.errors import ConfigurationError  # noqa: E402
from flockstep.frameworks.jax import JaxModel  # noqa: E402
from flockstep.frameworks.jax_layers import WHOLE, shape_of  # noqa: E402
from flockstep.frameworks.layers import job_shape  # noqa: E402
from support.jax_jobs import apply, apply_with_noise, init, job  # noqa: E402

X = np.ones((4, 6), np.float32)


@pytest.mark.parametrize("model", [JaxModel(init, apply), JaxModel(init, apply_with_noise, random=True)])
def test_a_network_with_one_hidden_layer(model: JaxModel) -> None:
    """4 inputs, 6 hidden units and 3 outputs, as linear layers with these sizes have them."""
    found = job_shape(job(model=lambda: model))
    hidden, out = found.layers
    assert [(one.name, one.kind, one.counted) for one in found.layers] == [
        ("hidden", "linear", "jax"),
        ("out", "linear", "jax"),
    ]
    assert (hidden.parameters, out.parameters, found.parameters) == (30, 21, 51)
    assert (hidden.multiply_adds, out.multiply_adds) == (24, 18)
    assert (hidden.reads, hidden.writes, out.reads, out.writes) == (4, 6, 6, 3)
    assert not hidden.by_input.products  # data need no gradient
    assert out.by_input.products == out.by_weight.products == 18
    assert found.unknown == ()
    assert found.itemsize == 4


def test_products_inside_of_jit_and_scan_count_as_often_as_they_run() -> None:
    @jax.jit
    def layer(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w.T)

    def run(params: Any, x: Any) -> Any:
        x = layer(params["first"]["w"], x)
        return jax.lax.scan(lambda h, w: (h @ w, None), x, params["loop"]["w"])[0]

    model = JaxModel(lambda key: {"first": {"w": jnp.ones((5, 6))}, "loop": {"w": jnp.ones((3, 5, 5))}}, run)
    found = {one.name: one.multiply_adds for one in shape_of(model, X, "looped").layers}
    assert found == {"first": 30, "loop": 75}


def test_convolutions_embeddings_and_products_of_activations() -> None:
    def run(params: Any, x: Any) -> Any:
        images = params["table"][x].reshape(4, 1, 6, 2)
        y = jax.lax.conv_general_dilated(images, params["conv"], (1, 1), "VALID")
        return jnp.einsum("nchw,ndhw->ncd", y, y)

    model = JaxModel(lambda key: {"table": jnp.ones((9, 2)), "conv": jnp.ones((3, 1, 3, 1))}, run)
    layers = {one.name: one for one in shape_of(model, np.ones((4, 6), np.int64), "picture").layers}
    assert layers["conv"].kind == "convolution"
    assert layers["conv"].multiply_adds == 3 * (4 * 2) * 3
    assert layers[WHOLE].multiply_adds == 3 * 3 * 8
    assert layers[WHOLE].by_input.products == 2 * 3 * 3 * 8
    assert layers["table"].counted == "unknown"
    assert layers["table"].parameters == 18


def test_what_cannot_be_counted() -> None:
    def loops(params: Any, x: Any) -> Any:
        return jax.lax.while_loop(lambda h: h.sum() > 0, lambda h: h @ params["w"], x)

    square = {"w": jnp.ones((6, 6))}
    with pytest.raises(
        ConfigurationError,
        match=r"while in apply computes a number of products that depends on the data, .*; use jax\.lax\.scan",
    ):
        shape_of(JaxModel(lambda key: square, loops), X, "loops")
    with pytest.raises(ConfigurationError, match="wrong failed on the sample batch: TypeError: "):
        shape_of(JaxModel(lambda key: square, lambda params, x: x @ params["w"][:3]), X, "wrong")
