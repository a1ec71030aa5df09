"""Majority vote: the trajectory of its algorithm, draws, equal bits, and a bit an element each way."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from flockstep.arrays.schema import slices
from flockstep.errors import ConfigurationError, Diverged, ProtocolError
from flockstep.strategies.base import Strategy
from flockstep.strategies.majority_vote import MajorityVote, MajorityVoteState, unpacked
from flockstep.testing.strategies import GradientSource, bowl_job, check_strategy, equal_bits, run_strategy, small_job
from support.matrix import few

STEPS = 15


def oracle(n, *, momentum=0.0, steps=STEPS, job=None, draw=1, sign_of_sum=False):
    """Return sign(Σ sign(m_i)), where a value >= 0 counts as +1."""
    job = job or small_job("sgd(lr=0.01)")
    source = GradientSource(n, job)
    w = source.start()
    stepper = source.stepper(w)
    kind = w.dtype.type
    means = [np.zeros_like(w) for _ in range(n)]
    for _ in range(steps):
        for rank in range(n):
            means[rank] = kind(momentum) * means[rank] + kind(1 - momentum) * source.gradient(rank, w)
        votes = sum(means) if sign_of_sum else sum(np.where(m >= 0, 1, -1) for m in means)
        stepper.step(w, np.where(votes > 0, 1, np.where(votes == 0, draw, -1)).astype(w.dtype))
    return w


@pytest.mark.oracle("strategy:majority_vote")
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 20])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_trajectory_equals_the_oracle(n, momentum):
    run = run_strategy(f"majority_vote({momentum})", n, STEPS, job=small_job("sgd(lr=0.01)"))
    assert equal_bits(run.result, *run.replicas, oracle(n, momentum=momentum))


@pytest.mark.negative_control("strategy:majority_vote")
@pytest.mark.parametrize("wrong", [{"draw": -1}, {"draw": 0}, {"momentum": 0.9}, {"sign_of_sum": True}])
def test_the_oracle_notices_what_is_wrong(wrong):
    run = run_strategy("majority_vote", 4, STEPS, job=small_job("sgd(lr=0.01)"))
    assert equal_bits(run.result, oracle(4))
    assert not equal_bits(run.result, oracle(4, **wrong))


def test_a_draw_and_a_gradient_of_zero_count_as_positive():
    """At the minimum of a bowl without noise all gradients are 0: every element steps down by lr."""
    run = run_strategy("majority_vote", 2, 1, job=bowl_job("sgd(lr=0.25)", noise=0.0, start=1.0))
    assert np.array_equal(run.result, np.full(8, 0.75))


@pytest.mark.parametrize("n", [2, 3, 5, 18, 20])
@pytest.mark.parametrize("size", [18, 64, 999])
def test_bytes_are_exact(n, size):
    """Slice by slice in whole bytes: everyone else's once, one's own n - 1 times; no scales."""
    run = run_strategy("majority_vote", n, 4, job=bowl_job("sgd(lr=0.01)", dimension=size))
    packed = [-(-(part.stop - part.start) // 8) for part in slices(size, n)]
    for rank, totals in run.totals.items():
        assert totals.sent_bytes == 4 * (sum(packed) - packed[rank] + (n - 1) * packed[rank])
        assert totals.messages_sent == totals.messages_received == 4 * 2 * (n - 1)


@pytest.mark.parametrize("text", few(["majority_vote", "majority_vote(0.9)"], "majority_vote(0.9)"))
def test_conforms(text):
    check_strategy(Strategy.parse(text), workers=(1, 3), alone_is_plain=False)


def test_refuses_what_makes_no_sense():
    with pytest.raises(ConfigurationError, match=r"momentum must be in \[0, 1\), got 1"):
        MajorityVote(momentum=1.0)
    with pytest.raises(ProtocolError, match="9 signs need 2 bytes of uint8, got 1 elements of uint8"):
        unpacked(np.zeros(1, np.uint8), 9)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_does_not_vote_with_what_has_no_sign(value):
    me = SimpleNamespace(state=MajorityVoteState(None))
    gradient = np.array([1, -1, value, 0], np.float32)
    with pytest.raises(
        Diverged,
        match=f"gradients must be finite for their signs to be counted, got {value} at element 2; lower the learning",
    ):
        MajorityVote()._mean(me, gradient)
