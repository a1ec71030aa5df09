"""DeMo: the trajectory of its algorithm, what is sent and what is kept, equal bits, exact bytes."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.errors import ConfigurationError
from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.numpy import SoftmaxRegression
from flockstep.strategies.base import Strategy
from flockstep.strategies.decoupled_momentum import DecoupledMomentum
from flockstep.testing.strategies import GradientSource, check_strategy, equal_bits, run_strategy
from support.matrix import few

FEATURES, CLASSES = 14, 9
SIZE = FEATURES * CLASSES
STEPS = 12
TEXT = "decoupled_momentum(beta=0.9, k=3, chunk=7)"


def wide_job(dtype="float64", optimizer="sgd(lr=0.02)"):
    """Softmax regression with a (14, 9) matrix and a vector of 9."""

    def data():
        random = np.random.default_rng(3)
        x, y = random.normal(size=(240, FEATURES)), random.integers(0, CLASSES, 240)
        return Data(x[:200], y[:200], x[200:], y[200:])

    return Job(lambda: SoftmaxRegression(FEATURES, CLASSES, dtype=dtype), data, optimizer, batch=8)


def cosines(n):
    f, i = np.mgrid[:n, :n]
    return np.where(f == 0, np.sqrt(1 / n), np.sqrt(2 / n)) * np.cos(np.pi * (i + 0.5) * f / n)


def largest(delta, k):
    """The `k` largest coefficients of (7, 3) chunks of the matrix and (3,) chunks of the vector, in loops."""
    q = np.zeros_like(delta)
    for part, shape, h, w in ((slice(0, SIZE), (FEATURES, CLASSES), 7, 3), (slice(SIZE, None), (1, CLASSES), 1, 3)):
        x, out = delta[part].reshape(shape), q[part].reshape(shape)
        for i in range(0, shape[0], h):
            for j in range(0, shape[1], w):
                spectrum = cosines(h) @ x[i : i + h, j : j + w] @ cosines(w).T
                if k < h * w:  # all coefficients would be more bytes than the elements
                    spectrum.flat[np.argsort(-np.abs(spectrum).ravel())[k:]] = 0
                out[i : i + h, j : j + w] = cosines(h).T @ spectrum @ cosines(w)
    return q


def oracle(n, *, beta=0.9, k=3, take_off=True, mean_of_signs=False, rates=(0.02,) * STEPS):
    """Algorithm 1 of the paper in float64."""
    source = GradientSource(n, wide_job())
    w = source.start()
    deltas = np.zeros((n, w.size))
    for lr in rates:
        sent = []
        for rank in range(n):
            deltas[rank] = beta * deltas[rank] + lr * source.gradient(rank, w)
            sent.append(largest(deltas[rank], k))
            deltas[rank] -= sent[-1] * take_off
        w = w - lr * (np.mean(np.sign(sent), 0) if mean_of_signs else np.sign(np.mean(sent, 0)))
    return w, deltas


def close(a, b):
    return np.allclose(a, b, rtol=0, atol=1e-12)


@pytest.mark.oracle("strategy:decoupled_momentum")
@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("beta", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("k", [1, 3])
def test_trajectory_equals_the_oracle(n, beta, k):
    run = run_strategy(f"decoupled_momentum({beta}, {k}, 7)", n, STEPS, job=wide_job())
    w, deltas = oracle(n, beta=beta, k=k)
    assert close(run.result, w)
    assert close([run.nodes[rank].state.delta for rank in range(n)], deltas)


@pytest.mark.negative_control("strategy:decoupled_momentum")
@pytest.mark.parametrize("wrong", [{"beta": 0.8}, {"k": 2}, {"take_off": False}, {"mean_of_signs": True}])
def test_the_oracle_notices_what_is_wrong(wrong):
    run = run_strategy(TEXT, 3, STEPS, job=wide_job())
    assert close(run.result, oracle(3)[0])
    assert not close(run.result, oracle(3, **wrong)[0])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_replicas_are_equal_in_every_bit(n, dtype):
    run = run_strategy(TEXT, n, STEPS, job=wide_job(dtype))
    assert equal_bits(run.result, *run.replicas)
    assert not equal_bits(*(run.nodes[rank].state.delta for rank in range(n)))


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_bytes_are_exact(n):
    """6 chunks of 7 × 3 with 3 coefficients of 5 + 32 bits each, 12 + 72 bytes, and 9 elements as they are."""
    run = run_strategy(TEXT, n, STEPS, job=wide_job("float32"))
    size = 12 + 72 + 36
    for totals in run.totals.values():
        assert totals.sent_bytes == totals.received_bytes == STEPS * (n - 1) * size
        assert totals.messages_sent == STEPS * (n - 1)


def test_every_gradient_counts_with_the_learning_rate_of_its_step():
    run = run_strategy(TEXT, 3, STEPS, job=wide_job(), schedule="step_decay(decay=0.25, at=(0.5,))")
    half = STEPS // 2
    assert close(run.result, oracle(3, rates=[0.02] * half + [0.005] * half)[0])
    assert not close(run.result, oracle(3)[0])


@pytest.mark.parametrize(
    "text",
    few(["decoupled_momentum(k=1, chunk=3)", "decoupled_momentum(beta=0)", TEXT], "decoupled_momentum(k=1, chunk=3)"),
)
def test_conforms(text):
    check_strategy(Strategy.parse(text), (1, 3), alone_is_plain=False)


def test_refuses_what_makes_no_sense():
    with pytest.raises(ConfigurationError, match=r"beta must be in \[0, 1\], got 1.5"):
        DecoupledMomentum(beta=1.5)
    with pytest.raises(ConfigurationError, match="k must be >= 1, got 0"):
        DecoupledMomentum(k=0)
