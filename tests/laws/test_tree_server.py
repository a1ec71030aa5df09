"""A reduction tree with a root that updates, against plain numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flockstep.records.events import EvaluationEvent
from flockstep.strategies.tree_server import depth, family
from flockstep.testing.strategies import GradientSource, equal_bits, run_strategy, small_job


def oracle(n, steps, optimizer):
    """One model; gradients are added as the tree adds them."""
    source = GradientSource(n, small_job(optimizer))
    w = source.start()
    stepper = source.stepper(w)
    for _ in range(steps):
        sums = [source.gradient(rank, w) for rank in range(n)]
        distance = 1
        while distance < n:
            for rank in range(0, n - distance, 2 * distance):
                sums[rank] = sums[rank] + sums[rank + distance]
            distance *= 2
        stepper.step(w, sums[0] / np.float32(n))
    return w


@pytest.mark.oracle("strategy:tree_server")
@pytest.mark.parametrize("optimizer", ["sgd(lr=0.1, momentum=0.9)", "adam(lr=0.02)"])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_equals_the_oracle_in_every_bit(n, optimizer):
    run = run_strategy("tree_server", n, 12, job=small_job(optimizer))
    assert equal_bits(*run.replicas, oracle(n, 12, optimizer))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 13, 16])
def test_the_tree_spans_everyone_in_as_many_levels_as_n_has_bits(n):
    for rank in range(n):
        parent, children = family(rank, n)
        assert (parent is None) == (rank == 0)
        assert all(family(child, n)[0] == rank for child in children)
        above, edges = parent, 0 if parent is None else 1
        while above:
            above, edges = family(above, n)[0], edges + 1
        assert edges == depth(rank) <= math.ceil(math.log2(n)) if n > 1 else edges == 0
    assert sum(len(family(rank, n)[1]) for rank in range(n)) == n - 1


@pytest.mark.parametrize("n", [2, 3, 8])
def test_everyone_but_the_root_sends_one_gradient_a_step(n):
    run = run_strategy("tree_server", n, 10)
    for rank in range(n):
        assert len(run.sent("gradient", rank)) == (10 if rank else 0)
    assert len(run.sent("parameters")) == 10 * (n - 1)


@pytest.mark.parametrize(("n", "rounds"), [(2, 1), (4, 2), (8, 3), (16, 4)])
def test_the_critical_path_is_logarithmic(n, rounds):
    """Latency alone: each of ceil(log2 n) levels costs one message up and one down."""
    run = run_strategy("tree_server", n, 5, compute="constant(1)", network="link(bandwidth=1e15, latency=0.1)")
    ends = [event.seconds for event in run.of(EvaluationEvent)]
    assert max(ends) == pytest.approx(5 * (1 + 2 * rounds * 0.1), rel=1e-9)


@pytest.mark.negative_control("strategy:tree_server")
def test_the_mean_over_the_wrong_number_shows():
    run = run_strategy("tree_server", 3, 12, job=small_job("sgd(lr=0.1)"))
    assert equal_bits(run.result, oracle(3, 12, "sgd(lr=0.1)"))
    assert not np.allclose(run.result, oracle(3, 12, "sgd(lr=0.05)"), atol=1e-3)
