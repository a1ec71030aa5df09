"""Gradients of JAX functions: batched and one by one, and what a job is refused for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

from flockstep.costs.cluster_file import load_cluster  # noqa: E402
from flockstep.errors import ConfigurationError, FlockstepError  # noqa: E402
from flockstep.frameworks.base import Data, DistillationTargets  # noqa: E402
from flockstep.frameworks.jax import JaxEngine, JaxModel  # noqa: E402
from flockstep.frameworks.job import make_engine  # noqa: E402
from flockstep.planning.job_profile import task_of  # noqa: E402
from flockstep.planning.plan import plan  # noqa: E402
from flockstep.planning.search import Race  # noqa: E402
from flockstep.runtime.state import from_bytes, to_bytes  # noqa: E402
from flockstep.testing.strategies import run_strategy  # noqa: E402
from support.jax_jobs import apply, apply_with_noise, cross_entropy, data, init, job, squares  # noqa: E402


def tree_of(engine: JaxEngine, params: np.ndarray) -> dict[str, Any]:
    views = engine.schema.views(params)
    return {part: {name: views[f"{part}.{name}"] for name in ("b", "w")} for part in ("hidden", "out")}


def flat_of(tree: dict[str, Any]) -> np.ndarray:
    return np.concatenate([np.ravel(tree[part][name]) for part in ("hidden", "out") for name in ("b", "w")])


def replicas(engine: JaxEngine, count: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(2)
    params = engine.initial() + 0.1 * random.normal(size=(count, engine.schema.size)).astype("float32")
    return params, random.integers(engine.train_size, size=(count, 8))


def close(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b))


@pytest.mark.parametrize("count", [1, 3])
def test_batched_equals_one_by_one_and_plain_jax(count: int) -> None:
    engine = make_engine(job(), 3)
    assert isinstance(engine, JaxEngine)
    params, indices = replicas(engine, count)
    together, alone = np.full_like(params, np.nan), np.full_like(params, np.nan)
    losses = engine.gradients(params, indices, together, range(count), [0] * count)
    samples = data()
    for r in range(count):
        loss = engine.gradient(params[r], indices[r], alone[r], r)
        x, y = samples.train_x[indices[r]], samples.train_y[indices[r]]
        tree = tree_of(engine, params[r])
        expected, slope = jax.value_and_grad(lambda w, x=x, y=y: cross_entropy(apply(w, x), y))(tree)
        assert loss == pytest.approx(float(expected), rel=1e-5)
        assert losses[r] == pytest.approx(float(expected), rel=1e-5)
        assert close(alone[r], flat_of(slope))
        assert close(together[r], flat_of(slope))


def test_more_replicas_than_one_call_takes() -> None:
    engine = JaxEngine(job(), 3)
    params, indices = replicas(engine, 70)
    together, alone = np.full_like(params, np.nan), np.empty_like(params)
    engine.gradients(params, indices, together, range(70), [0] * 70)
    for r in (0, 34, 35, 69):
        engine.gradient(params[r], indices[r], alone[r], r)
        assert close(together[r], alone[r])


def test_the_start_depends_on_the_seed() -> None:
    same, other = JaxEngine(job(), 3).initial(), JaxEngine(job(), 4).initial()
    assert np.array_equal(same, flat_of(init(jax.random.key(3))))
    assert not np.array_equal(same, other)


def test_evaluations_are_those_of_the_functions() -> None:
    engine, samples = JaxEngine(job(), 3), data()
    params, _ = replicas(engine, 2)
    outputs = [apply(tree_of(engine, each), samples.test_x) for each in params]
    found = engine.evaluate(params[0])
    assert found.loss == pytest.approx(float(cross_entropy(outputs[0], samples.test_y)), rel=1e-5)
    assert found.metric == np.mean(np.asarray(outputs[0]).argmax(-1) == samples.test_y)
    mean = np.log(np.mean([jax.nn.softmax(each) for each in outputs], 0))
    expected = cross_entropy(mean, samples.test_y)
    assert engine.evaluate_together(params, (0, 1)).loss == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("classes", [True, False])
def test_learning_from_other_models(classes: bool) -> None:
    samples, loss = data(), cross_entropy if classes else squares
    if not classes:
        wide = np.random.default_rng(0).normal(size=(60, 3)).astype("float32")
        samples = Data(samples.train_x, wide[:40], samples.test_x, wide[40:])
    metric = "accuracy" if classes else lambda outputs, y: float(np.abs(outputs - y).mean())
    engine = JaxEngine(job(data=lambda: samples, loss=loss, metric=metric), 3)
    params, indices = replicas(engine, 3)
    x, y = samples.train_x[indices[0]], samples.train_y[indices[0]]
    each = [apply(tree_of(engine, teacher), x) for teacher in params[1:]]

    def total(tree: Any) -> Any:
        outputs = apply(tree, x)
        if classes:
            taught = (jax.nn.softmax(each[0]) + jax.nn.softmax(each[1])) / 2
            return loss(outputs, y) - 0.5 * (taught * jax.nn.log_softmax(outputs)).sum(-1).mean()
        return loss(outputs, y) + 0.5 * squares(outputs, (each[0] + each[1]) / 2)

    out = np.empty_like(params[0])
    found = engine.distil(params[0], indices[0], out, DistillationTargets(params[1:], 0.5), 0, 0)
    assert found == pytest.approx(float(loss(apply(tree_of(engine, params[0]), x), y)), rel=1e-5)
    assert close(out, flat_of(jax.grad(total)(tree_of(engine, params[0]))))


def test_random_numbers_depend_on_seed_replica_and_step_alone() -> None:
    model = JaxModel(init, apply_with_noise, random=True)
    engine = JaxEngine(job(model=lambda: model), 3)
    params, indices = replicas(engine, 1)
    params, indices = np.repeat(params, 3, 0), np.repeat(indices, 3, 0)
    out, again = np.empty_like(params), np.empty_like(params[0])
    engine.gradients(params, indices, out, (0, 1, 1), (5, 5, 6))
    assert not close(out[0], out[1])
    assert not close(out[1], out[2])
    JaxEngine(job(model=lambda: model), 3).gradient(params[0], indices[0], again, 1, 6)
    assert close(again, out[2])
    assert engine.evaluate(params[0]) == engine.evaluate(params[0])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"loss": None}, "needs a loss"),
        ({"loss": lambda outputs, y: outputs.sum(-1)}, r"must be a scalar, the mean over a batch, got shape \(8,\)"),
        ({"loss": lambda outputs, y: cross_entropy(outputs[:, :0], y[:3])}, "must work on its first batch, got"),
        ({"optimizer": lambda params: None}, "must be an optax.GradientTransformation or an expression such as"),
        (
            {"optimizer": optax.add_noise(0.1, 0.5, key=jax.random.key(0))},
            r"must hold numbers, got a random key at \.rng_key",
        ),
        ({"model": lambda: JaxModel(lambda key: {"steps": jnp.zeros(2, "int32")}, apply)}, "steps must be an array of"),
        ({"model": lambda: JaxModel(lambda key: {"w": np.zeros(2)}, apply)}, "w is float64, which JAX would round"),
        ({"model": lambda: JaxModel(lambda key: {"w": 1.0}, apply)}, "w must be an array of .*, got float;"),
    ],
)
def test_what_cannot_be_trained_is_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make_engine(job(**changed), 0)


def stepped(engine: JaxEngine, optimizer: Any, state: Any, params: np.ndarray, steps: range) -> None:
    gradient = np.empty_like(params)
    for step in steps:
        engine.gradient(params, np.arange(8) + step, gradient)
        optimizer.step(params, gradient, state, optimizer.lr)


def test_a_saved_state_of_optax_goes_on_with_the_same_bits() -> None:
    given = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(optax.cosine_decay_schedule(0.1, 6)))
    engine = make_engine(job(optimizer=given), 3)
    assert isinstance(engine, JaxEngine)
    whole, halves = engine.initial(), engine.initial()
    stepped(engine, engine.optimizer, engine.optimizer.init(whole), whole, range(6))
    state = engine.optimizer.init(halves)
    stepped(engine, engine.optimizer, state, halves, range(3))
    begun_anew = halves.copy()
    stepped(engine, engine.optimizer, from_bytes(to_bytes(state)), halves, range(3, 6))
    assert np.array_equal(whole, halves)
    stepped(engine, engine.optimizer, engine.optimizer.init(begun_anew), begun_anew, range(3, 6))
    assert not np.array_equal(whole, begun_anew)


def test_a_learning_rate_of_optax_can_be_set_only_where_optax_tells_it() -> None:
    told = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    engines = [make_engine(job(optimizer=each), 3) for each in (told, "sgd(lr=0.5)")]
    models = [engine.initial() for engine in engines]
    for engine, params in zip(engines, models, strict=True):
        assert isinstance(engine, JaxEngine)
        optimizer = engine.optimizer.with_lr(0.5)
        stepped(engine, optimizer, optimizer.init(params), params, range(2))
    assert engines[0].optimizer.lr == pytest.approx(0.1)
    assert close(*models)
    for own in (optax.sgd(0.1), optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(0.1, 0, 9))):
        with pytest.raises(ConfigurationError, match=r"the learning rate 0.5 cannot be set, because"):
            make_engine(job(optimizer=own), 3).optimizer.with_lr(0.5)


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ("ps(ssp(2))", "updates slices of the parameters, got an optax optimizer, which needs whole layers"),
        ("decoupled_momentum", "needs the learning rate, which cannot be read from this optimizer"),
    ],
)
def test_strategies_that_optax_cannot_serve_refuse_it(strategy: str, said: str) -> None:
    with pytest.raises(FlockstepError, match=said):
        run_strategy(strategy, 2, 3, job=job(optimizer=optax.sgd(0.1)), engine=make_engine)


def test_targets_that_jax_would_cut_off_are_refused() -> None:
    samples = data()
    large = Data(samples.train_x, samples.train_y + 2**31, samples.test_x, samples.test_y)
    with pytest.raises(ConfigurationError, match="beyond 32 bits"):
        make_engine(job(data=lambda: large), 0)


@pytest.mark.parametrize(
    ("optimizer", "slots"), [("adam(lr=0.1)", 2), (optax.adam(0.1), 2), (optax.sgd(0.1, momentum=0.9), 1)]
)
def test_a_plan_knows_the_sizes_and_the_work_of_functions(optimizer: Any, slots: int) -> None:
    """Five products of matrices: two forward, two for the weights, one for the hidden units."""
    profile = task_of("own", imported=job(optimizer=optimizer))
    assert (profile.elements, profile.slots, profile.batch) == (51, slots, 8)
    assert set(profile.tensors) == {(6,), (4, 6), (3,), (6, 3)}
    products = 2 * 8 * (2 * 4 * 6 + 3 * 6 * 3)
    assert products < profile.work < 2 * products
    assert profile.noise < 30


def test_a_plan_refuses_only_strategies_whose_servers_would_step_with_optax() -> None:
    found = plan(
        task_of("own", imported=job(optimizer=optax.adam(0.1))),
        load_cluster("edge"),
        strategies=["all_reduce", "gossip", "ps"],
    )
    assert {one.name for one in found.predictions} >= {"all_reduce", "gossip"}
    [(name, why)] = found.refused
    assert name == "ps(consistency=bsp)"
    assert "updates slices of the parameters, got an optax optimizer" in why
    own = plan(task_of("own", imported=job()), load_cluster("edge"), strategies=["ps"])
    assert own.refused == ()


def test_a_search_needs_a_learning_rate_to_change() -> None:
    task = task_of("own", imported=job(optimizer=optax.adam(0.1), target=0.9))
    outlook = plan(task, load_cluster("edge"), strategies=["all_reduce"])
    with pytest.raises(ConfigurationError, match=r"trials change the learning rate, .*inject_hyperparams"):
        Race(outlook, outlook.predictions)


def network(rngs: Any) -> Any:
    from flax import nnx

    return nnx.Sequential(nnx.Linear(4, 6, rngs=rngs), jnp.tanh, nnx.Linear(6, 3, rngs=rngs))


def test_a_module_of_flax_is_a_model() -> None:
    """Of the module, one gradient is that of nnx.grad, and gradients of two replicas in one call are those of each."""
    nnx = pytest.importorskip("flax.nnx")
    made = JaxEngine(job(model=lambda: JaxModel.from_nnx(network)), seed=3)
    params, indices, batch = made.initial(), np.arange(8), data()
    out, module = np.empty_like(params), network(nnx.Rngs(jax.random.key(3)))
    loss = made.gradient(params, indices, out)
    expected, slopes = nnx.value_and_grad(lambda each: cross_entropy(each(batch.train_x[:8]), batch.train_y[:8]))(
        module
    )
    assert loss == pytest.approx(float(expected), rel=1e-5)
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(slopes)])
    np.testing.assert_allclose(out, flat, rtol=1e-4, atol=1e-6)
    both = np.empty((2, len(params)), params.dtype)
    made.gradients(np.stack([params, 2 * params]), np.stack([indices, indices]), both, [0, 1], [0, 0])
    made.gradient(2 * params, indices, out)
    np.testing.assert_allclose(both, [flat, out], rtol=1e-4, atol=1e-6)


def test_modules_of_flax_with_other_state_are_refused() -> None:
    nnx = pytest.importorskip("flax.nnx")
    for build, message in (
        (
            lambda rngs: nnx.BatchNorm(4, rngs=rngs),
            "must be an nnx.Param, got mean of type BatchStat: a job keeps no batch",
        ),
        (lambda rngs: nnx.Dropout(0.5, rngs=rngs), "must be an nnx.Param, got rngs.*count of type RngCount"),
        (lambda rngs: network, "got one that returns a value of type function; pass lambda rngs"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            JaxModel.from_nnx(build)
