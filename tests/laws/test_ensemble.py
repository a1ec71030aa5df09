"""Independent replicas, and the mean of their predictions, against plain numpy."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.frameworks.numpy import NumpyEngine
from flockstep.records.events import EvaluationEvent
from flockstep.testing.strategies import GradientSource, bowl_job, equal_bits, run_strategy, small_job


def trained(n, steps):
    """n models, each trained alone on its own part."""
    source = GradientSource(n)
    members = []
    for rank in range(n):
        w = source.start()
        stepper = source.stepper(w)
        for _ in range(steps):
            stepper.step(w, source.gradient(rank, w))
        members.append(w)
    return np.stack(members)


@pytest.mark.oracle("strategy:ensemble")
@pytest.mark.parametrize("n", [1, 2, 4])
def test_each_member_is_trained_alone_in_every_bit(n):
    run = run_strategy("ensemble", n, 12)
    assert equal_bits(run.replicas, trained(n, 12))
    assert equal_bits(run.result, run.replicas if n > 1 else run.replicas[0])
    assert all(totals.sent_bytes == totals.received_bytes == 0 for totals in run.totals.values())


@pytest.mark.oracle("strategy:ensemble")
def test_the_result_is_the_mean_of_the_predicted_probabilities():
    run = run_strategy("ensemble", 3, 12)
    data, probabilities = small_job().data(), []
    for w in trained(3, 12):
        logits = data.test_x.astype(np.float32) @ w[:15].reshape(5, 3) + w[15:]
        probabilities.append(np.exp(logits) / np.exp(logits).sum(1, keepdims=True))
    mean = np.mean(probabilities, axis=0)
    last = run.of(EvaluationEvent)[-1]
    assert last.metric == np.mean(mean.argmax(1) == data.test_y)
    assert last.loss == pytest.approx(-np.log(mean[np.arange(60), data.test_y]).mean(), rel=1e-5)


def test_without_classes_it_is_the_mean_of_the_outputs():
    engine = NumpyEngine(bowl_job(), 0)
    members = np.random.default_rng(0).normal(size=(3, 8))
    assert engine.evaluate_together(members, [0, 1, 2]).metric == pytest.approx(engine.evaluate(members.mean(0)).metric)


@pytest.mark.negative_control("strategy:ensemble")
def test_it_is_not_the_mean_of_the_parameters():
    run = run_strategy("ensemble", 4, 12)
    mean = GradientSource(4).engine.evaluate(run.replicas.mean(0))
    assert run.of(EvaluationEvent)[-1].loss != pytest.approx(mean.loss, rel=1e-4)


def test_a_dead_member_is_left_out():
    run = run_strategy("ensemble", 3, 12, compute="constant(1)", faults=["dies(1, 5)"])
    assert equal_bits(run.result, run.replicas[[0, 2]])
