"""PowerSGD: the trajectory of its algorithm, exactness, what is kept, equal bits, and exact bytes."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.arrays.schema import slices
from flockstep.codecs.low_rank import LowRank
from flockstep.errors import CompositionError, ConfigurationError
from flockstep.feedback.residual import Residual
from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.numpy import SoftmaxRegression
from flockstep.strategies import power_sgd
from flockstep.strategies.base import Strategy
from flockstep.strategies.power_sgd import PowerSgd
from flockstep.testing.strategies import GradientSource, check_strategy, equal_bits, run_strategy

FEATURES, CLASSES = 14, 9
STEPS = 12


class OtherFeedback(Residual):
    """A user's own feedback."""


def wide_job(dtype="float64", optimizer="sgd(lr=0.1)", rank=None):
    """Softmax regression with a (14, 9) matrix and a vector; inputs of that rank, so that gradients are."""

    def data():
        random = np.random.default_rng(3)
        x = random.normal(size=(240, rank or FEATURES)) @ random.normal(size=(rank or FEATURES, FEATURES))
        y = random.integers(0, CLASSES, 240)
        return Data(x[:200], y[:200], x[200:], y[200:])

    return Job(lambda: SoftmaxRegression(FEATURES, CLASSES, dtype=dtype), data, optimizer, batch=8)


def oracle(n, rank, job, *, warm=True, feedback=True, aggregated=False, steps=STEPS, errors_too=False):
    """Algorithms 1 and 2 for the one matrix and the one vector, in float64, with the QR decomposition."""
    source = GradientSource(n, job)
    w, shape, size = source.start(), (FEATURES, CLASSES), FEATURES * CLASSES
    stepper = source.stepper(w)
    q = np.random.default_rng((power_sgd.START, 0)).standard_normal((CLASSES, rank))
    errors = np.zeros((n, *shape))
    for step in range(1, steps + 1):
        gradients = [source.gradient(worker, w) for worker in range(n)]
        matrices = [g[:size].reshape(shape) + e for g, e in zip(gradients, errors, strict=True)]
        if not warm:
            q = np.random.default_rng((power_sgd.START, step)).standard_normal((CLASSES, rank))
        p = np.linalg.qr(np.mean([m @ q for m in matrices], axis=0))[0]
        own = [m.T @ p for m in matrices]
        q = np.mean(own, axis=0)
        if feedback:
            errors = np.array([m - p @ (q if aggregated else b).T for m, b in zip(matrices, own, strict=True)])
        bias = np.mean([g[size:] for g in gradients], axis=0)
        stepper.step(w, np.concatenate([(p @ q.T).ravel(), bias]))
    return (w, errors) if errors_too else w


def close(a, b):
    return np.allclose(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.oracle("strategy:powersgd")
@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("feedback", [True, False])
def test_trajectory_equals_the_oracle(n, rank, warm, feedback):
    text = f"powersgd({rank}, warm_start={str(warm).lower()}, feedback={'residual' if feedback else 'none'})"
    run = run_strategy(text, n, STEPS, job=wide_job())
    assert close(run.result, oracle(n, rank, wide_job(), warm=warm, feedback=feedback))


@pytest.mark.negative_control("strategy:powersgd")
@pytest.mark.parametrize("wrong", [{"warm": False}, {"feedback": False}, {"rank": 2}])
def test_the_oracle_notices_what_is_wrong(wrong):
    run = run_strategy("powersgd(1)", 3, STEPS, job=wide_job())
    assert close(run.result, oracle(3, 1, wide_job()))
    assert not close(run.result, oracle(3, job=wide_job(), **{"rank": 1} | wrong))


def test_every_worker_keeps_its_matrix_less_its_own_approximation():
    """The authors' code takes the mean Q: other errors of the same sum, so the same model."""
    n, size = 3, FEATURES * CLASSES
    run = run_strategy("powersgd(1)", n, STEPS, job=wide_job())
    kept = np.array([run.nodes[rank].state.error for rank in range(n)])
    (w, local), (same, mean) = (oracle(n, 1, wide_job(), aggregated=a, errors_too=True) for a in (False, True))
    assert close(kept[:, :size], local.reshape(n, size))
    assert not kept[:, size:].any()
    assert not close(local, mean)
    assert close(local.sum(0), mean.sum(0))
    assert close(w, same)


@pytest.mark.parametrize("collective", ["ring", "recursive_doubling"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_replicas_and_factors_are_equal_in_every_bit(n, dtype, collective):
    run = run_strategy(f"powersgd(2, collective={collective})", n, STEPS, job=wide_job(dtype, "adam(lr=0.02)"))
    assert equal_bits(run.result, *run.replicas)
    assert equal_bits(*(run.nodes[rank].state.right for rank in range(n)))
    assert not equal_bits(*(run.nodes[rank].state.error for rank in range(n)))


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bytes_are_exact(n, rank, dtype):
    """All workers together: 2 (n-1) times rank (14 + 9) + 9 elements a step."""
    run = run_strategy(f"powersgd({rank})", n, STEPS, job=wide_job(dtype))
    elements = rank * (FEATURES + CLASSES) + CLASSES
    assert sum(b.sent_bytes for b in run.totals.values()) == STEPS * 2 * (n - 1) * elements * np.dtype(dtype).itemsize
    first, second = rank * FEATURES + CLASSES, rank * CLASSES
    for rank_, totals in run.totals.items():
        chunks = [[part.stop - part.start for part in slices(size, n)] for size in (first, second)]
        sent = sum(2 * sum(c) - c[(rank_ + 1) % n] - c[(rank_ + 2) % n] for c in chunks)
        assert totals.sent_bytes == STEPS * sent * np.dtype(dtype).itemsize
        assert totals.messages_sent == STEPS * 4 * (n - 1)


def test_a_matrix_no_larger_than_its_factors_is_averaged_as_it_is():
    """6 (14 + 9) > 14 · 9: the same as all-reduce, in every bit and byte."""
    ours, dense = (run_strategy(s, 3, STEPS, job=wide_job()) for s in ("powersgd(6)", "all_reduce"))
    assert equal_bits(ours.result, dense.result)
    assert [b.sent_bytes for b in ours.totals.values()] == [b.sent_bytes for b in dense.totals.values()]


def test_layout_by_hand():
    layout = LowRank(((4,), (8, 3, 2), (2, 2), (), (10, 6)), 2)
    assert [(m.part, m.rows, m.columns) for m in layout.matrices] == [(slice(4, 52), 8, 6), (slice(57, 117), 10, 6)]
    assert layout.dense == (slice(0, 4), slice(52, 57))
    assert (layout.size, layout.dense_size) == (117, 9)
    assert (layout.lefts, layout.rights) == ([slice(0, 16), slice(16, 36)], [slice(0, 12), slice(12, 24)])


@pytest.mark.parametrize("text", ["powersgd(1)", "powersgd(1, warm_start=false)", "powersgd(1, feedback=none)"])
def test_conforms_where_matrices_are_factored(text):
    check_strategy(Strategy.parse(text), (1, 3), alone_is_plain=False)


def test_refuses_what_makes_no_sense():
    with pytest.raises(ConfigurationError, match="rank must be >= 1, got 0"):
        PowerSgd(rank=0)
    with pytest.raises(CompositionError, match="must be residual or none"):
        PowerSgd(feedback=OtherFeedback())


def apart(text, steps, nudge=1e-12):
    """How many times as far as their starts the ends of two runs are apart, in float64."""
    random = np.random.default_rng(0)
    start, off = random.standard_normal((2, FEATURES * CLASSES + CLASSES))
    starts = 0.01 * start, 0.01 * start + nudge * off
    one, other = (run_strategy(text, 2, steps, job=wide_job(), replicas=np.tile(s, (2, 1))).result for s in starts)
    return np.abs(one - other).max() / nudge


def test_error_feedback_amplifies_rounding_and_nothing_else_does():
    assert apart("powersgd", 60) > 1e4  # so real and simulated runs part, though each rounds as it should
    assert apart("powersgd(feedback=none)", 60) < 1e3
    assert apart("all_reduce", 60) < 10
