"""Codistillation against plain numpy: whose predictions draw, how much, and how old they are."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.errors import CompositionError
from flockstep.testing.strategies import GradientSource, bowl_job, equal_bits, run_strategy, small_job


def softmax(logits):
    e = np.exp(logits - logits.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def slope(w, x, y, teachers, weight):
    """Of mean cross-entropy + weight × mean cross-entropy with the teachers' mean probabilities."""
    matrix, bias = w[:15].reshape(5, 3), w[15:]
    p = softmax(x @ matrix + bias)
    error = p - np.eye(3)[y]
    if teachers:
        error = error + weight * (p - np.mean([softmax(x @ t[:15].reshape(5, 3) + t[15:]) for t in teachers], axis=0))
    error /= len(x)
    return np.concatenate([(x.T @ error).ravel(), error.sum(0)])


def run(text, n=3, steps=15):
    job = small_job(dtype="float64")
    return run_strategy(text, n, steps, job=job, compute="constant(1)", network="link(bandwidth=1e9, latency=0.001)")


@pytest.mark.oracle("strategy:codistillation")
@pytest.mark.parametrize(("n", "period", "weight", "burn_in"), [(2, 5, 1.0, 0), (3, 4, 0.5, 0), (3, 2, 2.0, 9)])
def test_equals_the_oracle(n, period, weight, burn_in):
    """A copy sent before a step's gradient arrives during it, so that it draws from the next step on."""
    found = run(f"codistillation({period}, {weight}, {burn_in})", n).replicas
    source, data = GradientSource(n), small_job(dtype="float64").data()
    w = [source.start().astype(np.float64) for _ in range(n)]
    held: list[dict[int, np.ndarray]] = [{} for _ in range(n)]
    for step in range(15):
        sent = {rank: w[rank].copy() for rank in range(n)} if step and step % period == 0 else {}
        for rank in range(n):
            batch = source._samplers[rank].next()
            teachers = list(held[rank].values()) if step >= burn_in else []
            w[rank] = w[rank] - 0.1 * slope(w[rank], data.train_x[batch], data.train_y[batch], teachers, weight)
        for rank in range(n):
            held[rank].update({peer: copy for peer, copy in sent.items() if peer != rank})
    assert np.allclose(found, np.stack(w), rtol=0, atol=1e-12)


@pytest.mark.oracle("strategy:codistillation")
@pytest.mark.parametrize("text", ["codistillation(5, 0)", "codistillation(100)", "codistillation(5, burn_in=100)"])
def test_without_distance_it_is_an_ensemble_in_every_bit(text):
    assert equal_bits(run(text).replicas, run("ensemble").replicas)


@pytest.mark.negative_control("strategy:codistillation")
def test_learning_from_others_shows():
    assert not np.allclose(run("codistillation(5)").replicas, run("ensemble").replicas, atol=1e-4)
    apart = [np.ptp(run(text, steps=40).replicas, axis=0).max() for text in ("codistillation(2, 5)", "ensemble")]
    assert apart[0] < 0.7 * apart[1]


def test_copies_travel_once_a_period():
    found = run("codistillation(4)", 3, 15)
    assert len(found.sent("copy")) == 3 * 3 * 2
    assert {totals.sent_bytes for totals in found.totals.values()} == {3 * 2 * 18 * 8}


def test_a_model_without_classes_is_refused():
    with pytest.raises(CompositionError, match="QuadraticModel has no classes and cannot learn from"):
        run_strategy("codistillation(1)", 2, 8, job=bowl_job())


def test_workers_may_die():
    job = small_job(dtype="float64")
    found = run_strategy("codistillation(3)", 3, 12, job=job, compute="constant(1)", faults=["dies(1, 5.5)"])
    assert [found.nodes[rank].step for rank in range(3)] == [12, 4, 12]  # two copies: 5/3 as long
