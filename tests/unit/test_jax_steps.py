"""`flockstep.jax.distribute` in one process: what a step does to a tree of parameters."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402

import flockstep.jax  # noqa: E402
from flockstep.errors import CompositionError, ConfigurationError, Diverged  # noqa: E402
from flockstep.frameworks.jax_optax import FlatOptax  # noqa: E402
from flockstep.frameworks.jax_tree import FlatTree  # noqa: E402
from support.jax_jobs import apply, cross_entropy, data, init  # noqa: E402


def start() -> Any:
    return init(jax.random.key(0))


def slopes(params: Any) -> Any:
    samples = data()
    return jax.grad(lambda tree: cross_entropy(apply(tree, samples.train_x), samples.train_y))(params)


def plain(optimizer: Any, params: Any, steps: int) -> Any:
    """What optax alone makes of the parameters."""
    state = optimizer.init(params)
    for _ in range(steps):
        updates, state = optimizer.update(slopes(params), state, params)
        params = optax.apply_updates(params, updates)
    return params


def stepped(optimizer: Any, strategy: str, steps: int) -> Any:
    with flockstep.jax.distribute(start(), optimizer, strategy) as trainer:
        params = trainer.params
        for _ in range(steps):
            params = trainer.step(slopes(params))
    return trainer.params


def test_a_recorded_loss_that_is_not_finite_ends_the_run_at_its_step() -> None:
    trainer = flockstep.jax.distribute(start(), optax.sgd(0.1), "all_reduce")
    trainer.record_loss(jnp.float32(1.0))
    params = trainer.step(slopes(trainer.params))
    trainer.record_loss(jnp.float32(jnp.nan))
    with pytest.raises(Diverged, match="the loss of worker 0 is nan"):
        trainer.step(slopes(params))


def close(one: Any, other: Any, within: float = 1e-5) -> bool:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.allclose(a, b, within, within / 10) for a, b in pairs)


OPTIMIZERS = {
    "sgd(lr=0.3)": lambda: optax.sgd(0.3),
    "sgd(lr=0.1, momentum=0.9)": lambda: optax.sgd(0.1, momentum=0.9),
    "sgd(lr=0.1, momentum=0.9, nesterov=True)": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam(lr=0.01)": lambda: optax.adam(0.01),
    "adamw(lr=0.01, weight_decay=0.1)": lambda: optax.adamw(0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("text", OPTIMIZERS)
def test_steps_are_those_of_optax_and_of_the_expression(text: str) -> None:
    """docs/how-to/jax.md names these expressions as equal to the optimizers of optax."""
    optimizer = OPTIMIZERS[text]()
    expected = plain(optimizer, start(), 5)
    assert not close(expected, start())
    assert close(stepped(optimizer, "local_sgd(period=2)", 5), expected)
    assert close(stepped(text, "local_sgd(period=2)", 5), expected)
    assert close(stepped(text, "ps(bsp)", 5), expected)


def test_layer_wise_optimizers_see_the_tree() -> None:
    matrices = optax.masked(optax.add_decayed_weights(0.1), lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree))
    optimizer = optax.chain(matrices, optax.lamb(0.1))
    assert close(stepped(optimizer, "all_reduce", 4), plain(optimizer, start(), 4))


def test_what_step_returns_does_not_change_later() -> None:
    trainer = flockstep.jax.distribute(jnp.zeros(1024), optax.sgd(1.0), "all_reduce")
    first = trainer.params
    second = trainer.step(jnp.ones(1024))
    third = trainer.step(jnp.ones(1024))
    assert [float(each[0]) for each in (first, second, third)] == [0.0, -1.0, -2.0]
    assert float(trainer.finish()[5]) == -2.0


def test_flax_modules() -> None:
    nnx = pytest.importorskip("flax.nnx")

    def model() -> Any:
        return nnx.Sequential(nnx.Linear(4, 6, rngs=nnx.Rngs(0)), nnx.tanh, nnx.Linear(6, 3, rngs=nnx.Rngs(1)))

    def loss(module: Any, x: Any, y: Any) -> Any:
        return cross_entropy(module(x), y)

    samples, alone, ours = data(), model(), model()
    optimizer = nnx.Optimizer(alone, optax.adam(0.1), wrt=nnx.Param)
    trainer = flockstep.jax.distribute(nnx.state(ours, nnx.Param), optax.adam(0.1), "all_reduce")
    for _ in range(3):
        optimizer.update(alone, nnx.grad(loss)(alone, samples.train_x, samples.train_y))
        nnx.update(ours, trainer.step(nnx.grad(loss)(ours, samples.train_x, samples.train_y)))
    assert close(nnx.state(ours, nnx.Param), nnx.state(alone, nnx.Param))
    assert trainer.loop._params.shape == (4 * 6 + 6 + 6 * 3 + 3,)


def test_a_module_of_flax_is_no_tree_of_parameters() -> None:
    nnx = pytest.importorskip("flax.nnx")
    with pytest.raises(ConfigurationError, match=r"got the module Linear; pass nnx.state\(module, nnx.Param\)"):
        flockstep.jax.distribute(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), optax.sgd(0.1), "all_reduce")


def test_narrow_parameters_are_stepped_in_float32() -> None:
    trainer = flockstep.jax.distribute({"w": jnp.ones(3, jnp.bfloat16)}, optax.sgd(2.0**-10), "all_reduce")
    for _ in range(8):
        params = trainer.step({"w": jnp.ones(3, jnp.bfloat16)})
    assert params["w"].dtype == jnp.bfloat16
    assert float(params["w"][0]) == 1 - 2.0**-7  # each step alone would be rounded away


def test_sync_continues_from_other_parameters() -> None:
    trainer = flockstep.jax.distribute({"w": jnp.zeros(2)}, "sgd(lr=1.0)", "ps(bsp)")
    trainer.step({"w": jnp.ones(2)})
    assert trainer.sync({"w": jnp.full(2, 5.0)})["w"].tolist() == [5.0, 5.0]
    assert trainer.step({"w": jnp.ones(2)})["w"].tolist() == [4.0, 4.0]
    assert trainer.consensus()["w"].tolist() == [4.0, 4.0]
    assert trainer.finish()["w"].tolist() == [4.0, 4.0]


def test_the_state_of_optax_can_be_saved_and_loaded() -> None:
    optimizer = optax.adam(0.01)
    trainer = flockstep.jax.distribute(start(), optimizer, "all_reduce")
    params = trainer.params
    for _ in range(3):
        params = trainer.step(slopes(params))
    resumed = flockstep.jax.distribute(params, optimizer, "all_reduce", optimizer_state=trainer.optimizer_state)
    for _ in range(2):
        params = resumed.step(slopes(params))
    assert close(params, plain(optimizer, start(), 5))


def test_a_learning_rate_that_optax_tells_is_used() -> None:
    told = optax.inject_hyperparams(optax.sgd)(learning_rate=0.25)
    strategy = "decoupled_momentum"
    by_text, by_optax = stepped("sgd(lr=0.25)", strategy, 4), stepped(told, strategy, 4)
    assert close(by_optax, by_text)
    with pytest.raises(ConfigurationError, match="needs the learning rate, which cannot be read from this optimizer"):
        stepped(optax.sgd(0.25), strategy, 4)


def test_a_schedule_of_optax_tells_the_rate_of_the_next_step() -> None:
    rates = [0.5, 0.25, 0.125, 0.0625]
    schedule = optax.exponential_decay(rates[0], transition_steps=1, decay_rate=0.5)
    trainer = flockstep.jax.distribute(jnp.zeros(2), optax.inject_hyperparams(optax.sgd)(schedule), "all_reduce")
    params, told, taken = trainer.params, [], []
    for _ in rates:
        told.append(trainer.loop.lr)
        before, params = params, trainer.step(jnp.ones(2))
        taken.append(float(before[0] - params[0]))
    assert (told, taken) == (rates, rates)


def test_values_that_are_not_finite_are_told() -> None:
    trainer = flockstep.jax.distribute({"a": jnp.zeros(2), "b": jnp.zeros(2)}, optax.sgd(1e30), "all_reduce")
    with pytest.warns(RuntimeWarning, match="not finite after step 1, the first is b"):
        trainer.step({"a": jnp.ones(2), "b": jnp.full(2, 1e30)})


@pytest.mark.parametrize(
    ("params", "optimizer", "strategy", "said"),
    [
        (
            {"w": jnp.zeros(2)},
            optax.sgd(0.1),
            "ps(bsp)",
            "servers of .* got an optax optimizer, whose settings cannot be",
        ),
        ({"w": jnp.zeros(2)}, "lamb(lr=0.1)", "ps(bsp)", "which needs whole layers"),
        ({"w": jnp.zeros(2)}, 0.1, "all_reduce", "must be an optax.GradientTransformation or an expression .* float"),
        ({"w": jnp.zeros(2, "int32")}, optax.sgd(0.1), "all_reduce", "parameter w must be an array of .*, got int32"),
        (
            {"a.b": jnp.zeros(2), "a": {"b": jnp.zeros(2)}},
            optax.sgd(0.1),
            "all_reduce",
            "different name, got 'a.b' twice",
        ),
        ({}, optax.sgd(0.1), "all_reduce", "no trainable parameter"),
        (
            {"w": jnp.zeros(2)},
            optax.sgd(0.1),
            "sandblaster",
            "gradients that a training loop in a script cannot provide",
        ),
    ],
)
def test_what_cannot_be_distributed_is_refused(params: Any, optimizer: Any, strategy: str, said: str) -> None:
    with pytest.raises((ConfigurationError, CompositionError), match=said):
        flockstep.jax.distribute(params, optimizer, strategy)


@pytest.mark.parametrize(
    ("grads", "said"),
    [
        ({"v": jnp.zeros(2)}, "the gradients must be a tree with the structure of the parameters"),
        ({"w": jnp.zeros(3)}, r"must have w of shape \(2,\), got \(3,\)"),
    ],
)
def test_gradients_of_another_model_are_refused(grads: Any, said: str) -> None:
    trainer = flockstep.jax.distribute({"w": jnp.zeros(2)}, optax.sgd(0.1), "all_reduce")
    with pytest.raises(ConfigurationError, match=said):
        trainer.step(grads)


def test_a_step_inside_jit_is_refused() -> None:
    trainer = flockstep.jax.distribute({"w": jnp.zeros(2)}, optax.sgd(0.1), "all_reduce")
    with pytest.raises(
        ConfigurationError, match="must be arrays, got a traced value for w; call flockstep outside jax"
    ):
        jax.jit(lambda grads: trainer.step(grads))({"w": jnp.zeros(2)})


def test_parameters_on_several_devices_are_refused() -> None:
    code = """
import jax, numpy as np, optax, flockstep.jax
mesh = jax.sharding.Mesh(np.array(jax.devices()), "x")
params = jax.device_put(np.zeros(2, "float32"), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
flockstep.jax.distribute({"w": params}, optax.sgd(0.1), "all_reduce")
"""
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    environment |= os.environ
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "parameter w must be on one device, got 2" in done.stderr


def weighed(last: float) -> Any:
    """A chain that multiplies the first weights by a constant array."""
    weights = np.append(np.linspace(0, 1, 23), last).astype("float32").reshape(4, 6)

    def update(updates: Any, params: Any) -> Any:
        return updates | {"hidden": {"w": updates["hidden"]["w"] * weights, "b": updates["hidden"]["b"]}}

    return optax.stateless(update)


DIFFERENT = {
    "sgd": lambda: optax.sgd(0.1),
    "another rate": lambda: optax.sgd(0.2),
    "a rate one bit higher": lambda: optax.sgd(float(np.nextafter(np.float32(0.1), np.float32(1)))),
    "a rule": lambda: optax.adam(0.1),
    "a chain": lambda: optax.chain(optax.clip(1.0), optax.sgd(0.1)),
    "a schedule": lambda: optax.sgd(optax.linear_schedule(0.1, 0.0, 20)),
    "a longer schedule": lambda: optax.sgd(optax.linear_schedule(0.1, 0.0, 21)),
    "an array": lambda: weighed(1.0),
    "an array with another last element": lambda: weighed(2.0),
}


def test_optimizers_have_one_digest_if_they_compute_the_same() -> None:
    tree = FlatTree(start())
    flat = np.empty(tree.schema.size, tree.schema.dtype)
    tree.write(start(), flat)

    def digest(name: str) -> str:
        optimizer = FlatOptax(DIFFERENT[name](), tree)
        return optimizer.digest(optimizer.init(flat))

    found = [digest(name) for name in DIFFERENT]
    assert found == [digest(name) for name in DIFFERENT]
    assert len(set(found)) == len(DIFFERENT)
