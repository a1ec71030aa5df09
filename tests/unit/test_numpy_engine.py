"""Plain numpy problems: exact gradients, and the same bits whoever is computed together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flockstep.errors import ConfigurationError, UnknownName
from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.numpy import Model, NumpyEngine, QuadraticModel, SoftmaxRegression, accuracy
from flockstep.optimizers.sgd import SGD


def softmax_job(dtype: str = "float64", samples: int = 300, features: int = 7, classes: int = 4, **changes: Any) -> Job:
    random = np.random.default_rng(5)
    y = random.integers(classes, size=samples)
    x = random.normal(size=(samples, features)) + np.eye(classes, features)[y] * 3
    job = Job(
        model=lambda: SoftmaxRegression(features, classes, l2=0.1, dtype=dtype),
        data=lambda: Data(x, y, x[:60], y[:60]),
        optimizer="sgd(lr=0.5)",
    )
    return replace(job, **changes)


def quadratic_job(dtype: str = "float64", full: bool = True, noise: float = 0.3) -> Job:
    random = np.random.default_rng(6)
    root = random.normal(size=(9, 9))
    hessian = root @ root.T + np.eye(9) if full else np.linspace(0.1, 2, 9)
    x = random.normal(size=9) + noise * random.normal(size=(200, 9))
    return Job(
        model=lambda: QuadraticModel((hessian + hessian.T) / 2, dtype=dtype),
        data=lambda: Data(x, np.zeros(200), x, np.zeros(200)),
        optimizer=SGD(lr=0.01),
        metric=lambda outputs, targets: float(np.mean(outputs**2)),
    )


JOBS = {
    "softmax": softmax_job,
    "wide softmax": lambda dtype="float64": softmax_job(dtype, features=64, classes=10),
    "quadratic": quadratic_job,
    "diagonal quadratic": lambda dtype="float64": quadratic_job(dtype, full=False),
}


def replicas(engine: NumpyEngine, count: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(8)
    params = engine.initial() + random.normal(size=(count, engine.schema.size)).astype(engine.schema.dtype)
    return params, random.integers(engine.train_size, size=(count, batch))


@pytest.mark.parametrize("name", JOBS)
def test_gradient_is_the_slope_of_the_loss(name: str) -> None:
    engine = NumpyEngine(JOBS[name](), seed=0)
    params, indices = replicas(engine, 1, 16)
    out, spare = np.empty_like(params[0]), np.empty_like(params[0])
    engine.gradient(params[0], indices[0], out)
    for k in range(0, engine.schema.size, 3):
        nearby = np.repeat(params, 2, axis=0)
        nearby[0, k] -= 1e-5
        nearby[1, k] += 1e-5
        low, high = (engine.gradient(p, indices[0], spare) for p in nearby)
        assert out[k] == pytest.approx((high - low) / 2e-5, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("batch", [1, 8, 33])
@pytest.mark.parametrize("name", JOBS)
def test_together_or_one_by_one_gives_the_same_bits(name: str, batch: int, dtype: str) -> None:
    engine = NumpyEngine(JOBS[name](dtype), seed=0)
    params, indices = replicas(engine, 11, batch)
    together, alone = np.empty_like(params), np.empty_like(params)
    losses = engine.gradients(params, indices, together, range(11), [0] * 11)
    for r in range(11):
        assert engine.gradient(params[r].copy(), indices[r], alone[r]) == losses[r]
    assert together.tobytes() == alone.tobytes()
    some = np.empty_like(params[2:5])
    engine.gradients(params[2:5], indices[2:5], some, range(2, 5), [0] * 3)
    assert some.tobytes() == together[2:5].tobytes()
    assert engine.batching == "batched"


def test_a_replica_counts_its_own_parameters_and_samples() -> None:
    engine = NumpyEngine(softmax_job(), seed=0)
    params, indices = replicas(engine, 2, 8)
    out = np.empty((4, engine.schema.size))
    order = [0, 1, 0, 1]
    engine.gradients(params[[0, 1, 1, 0]], indices[order], out, order, [0] * 4)
    assert len({row.tobytes() for row in out}) == 4


def test_quadratic_without_noise_has_a_known_gradient_and_optimum() -> None:
    job = quadratic_job(noise=0.0)
    engine = NumpyEngine(job, seed=1)
    optimum = job.data().train_x[0]
    out = np.empty(9)
    assert engine.gradient(optimum, np.arange(5), out) == pytest.approx(0, abs=1e-20)
    np.testing.assert_allclose(out, 0, atol=1e-12)
    start = engine.initial()
    engine.gradient(start, np.arange(5), out)
    assert isinstance(engine.model, QuadraticModel)
    np.testing.assert_allclose(out, engine.model.hessian @ (start - optimum), rtol=1e-12)


def test_sgd_on_the_softmax_problem_learns() -> None:
    engine = NumpyEngine(softmax_job("float32"), seed=0)
    params, out, random = engine.initial(), np.empty(engine.schema.size, "float32"), np.random.default_rng(0)
    before = engine.evaluate(params)
    assert before.loss == pytest.approx(np.log(4), rel=1e-6)
    state = engine.optimizer.init(params)
    for _ in range(100):
        engine.gradient(params, random.integers(engine.train_size, size=32), out)
        engine.optimizer.step(params, out, state, engine.optimizer.lr)
    after = engine.evaluate(params)
    assert after.metric > 0.9 > before.metric
    assert after.loss < before.loss


def test_evaluation_equals_the_training_loss_on_the_same_samples() -> None:
    for job in (softmax_job(), quadratic_job()):
        engine = NumpyEngine(job, seed=0)
        params, _ = replicas(engine, 1, 1)
        out = np.empty(engine.schema.size)
        samples = np.arange(len(job.data().test_x))
        assert engine.evaluate(params[0]).loss == pytest.approx(engine.gradient(params[0], samples, out), rel=1e-12)


def test_initial_follows_the_seed_and_is_a_copy() -> None:
    first, again, other = (NumpyEngine(quadratic_job(), seed=s).initial() for s in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    engine = NumpyEngine(quadratic_job(), seed=1)
    engine.initial()[:] = 0
    assert np.array_equal(engine.initial(), first)


def test_labels_and_sizes() -> None:
    engine = NumpyEngine(softmax_job(samples=90), seed=0)
    assert engine.train_size == 90
    assert engine.labels is not None
    assert engine.labels.dtype == np.int64
    assert NumpyEngine(quadratic_job(), seed=0).labels is None
    assert [e.name for e in engine.schema.entries] == ["weight", "bias"]


def test_accuracy_counts_the_largest_output() -> None:
    assert accuracy(np.array([[1.0, 2], [3, 0], [0, 1], [1, 0]]), np.array([1, 0, 0, 0])) == 0.75


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"loss": lambda o, t: 0.0}, "SoftmaxRegression defines its own loss"),
        ({"optimizer": lambda params: None}, "must be an expression such as"),
        ({"metric": "auc"}, "metric must be 'accuracy' or a function"),
        ({"model": dict}, "needs a flockstep.frameworks.numpy.Model, got dict"),
    ],
)
def test_a_job_that_does_not_fit_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        NumpyEngine(softmax_job(**changes), seed=0)


def test_accuracy_needs_classes() -> None:
    with pytest.raises(ConfigurationError, match="accuracy needs integer targets, got float64"):
        NumpyEngine(replace(quadratic_job(), metric="accuracy"), seed=0)


def test_unknown_optimizer_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'sgd'"):
        NumpyEngine(softmax_job(optimizer="sdg(lr=1)"), seed=0)


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: QuadraticModel(np.ones((2, 3))), r"must have shape \(d,\) or \(d, d\), got \(2, 3\)"),
        (lambda: QuadraticModel(np.array([[1.0, 2], [0, 1]])), "must be symmetric"),
        (lambda: QuadraticModel(np.ones(2), start=np.ones(3)), r"start must have shape \(2,\)"),
        (lambda: SoftmaxRegression(0, 2), "features >= 1 and classes >= 2, got 0 and 2"),
        (lambda: SoftmaxRegression(2, 2, l2=-1), "l2 must be >= 0, got -1"),
    ],
)
def test_impossible_models_are_refused(build: Any, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        build()


def test_a_model_of_ones_own() -> None:
    class Mean(Model):
        dtype = "float64"
        shapes = {"m": ()}  # type: ignore[assignment]  # noqa: RUF012

        def initial(self, random: np.random.Generator) -> dict[str, Any]:
            return {"m": 2.0}

        def gradients(self, params: Any, x: Any, y: Any, out: Any) -> Any:
            apart = params["m"] - x.mean(axis=1)
            out["m"][:] = apart
            return apart**2 / 2

        def outputs(self, params: Any, x: Any) -> Any:
            return params["m"] - x

        def loss(self, params: Any, outputs: Any, y: Any) -> float:
            return float(np.mean(outputs**2) / 2)

    x = np.array([1.0, 3.0])
    job = Job(Mean, lambda: Data(x, x, x, x), "sgd(lr=1)", metric=lambda o, t: 0.0)
    engine, out = NumpyEngine(job, seed=0), np.empty(1)
    assert engine.gradient(engine.initial(), np.array([0]), out) == 0.5
    assert out.tolist() == [1.0]
