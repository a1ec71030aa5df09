"""NoLoCo: outer steps of random pairs against the oracle, the pull of a pair together, and a partner that dies."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.errors import ConfigurationError, PeerLost
from flockstep.strategies.base import Strategy
from flockstep.strategies.noloco import NoLoCo
from flockstep.testing.strategies import GradientSource, bowl_job, check_strategy, run_strategy
from support.oracles.noloco import noloco

JOB = bowl_job("sgd(lr=0.1)")
PERIOD, ROUNDS = 3, 7


def groups(strategy, n):
    """Every outer step's pairs, as the strategy draws them."""
    pairs = [[(i, strategy.partner(n, i, step)) for i in range(n)] for step in range(1, ROUNDS + 1)]
    return [[(i, j) for i, j in step if j is not None and i < j] for step in pairs]


def expected(strategy, n, start=None):
    source = GradientSource(n, JOB)
    slow = np.tile(source.start(), (n, 1)) if start is None else start
    gamma = strategy.lr if strategy.gamma is None else strategy.gamma
    constants = {"alpha": strategy.momentum, "beta": strategy.lr, "gamma": gamma}
    settings = {"inner_steps": PERIOD, "lr": 0.1, **constants}
    return noloco(slow, lambda i, w, _: source.gradient(i, w), groups(strategy, n), **settings)


def far_from(strategy, n, oracle):
    run = run_strategy(strategy, n, ROUNDS * PERIOD, job=JOB)
    deltas = np.stack([run.nodes[rank].state.delta for rank in range(n)])
    return max(np.abs(run.replicas - oracle.models[-1]).max(), np.abs(deltas - oracle.delta).max())


@pytest.mark.oracle("strategy:noloco")
@pytest.mark.parametrize("strategy", [NoLoCo(PERIOD), NoLoCo(PERIOD, 0.5, 0.9, 0.3, seed=4)], ids=str)
@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_equals_the_oracle(n, strategy):
    assert far_from(strategy, n, expected(strategy, n)) < 1e-13


class SamePairs(NoLoCo):
    """Wrong strategy: the pairs never change."""

    def partner(self, workers, rank, outer_step):
        return super().partner(workers, rank, 1)


@pytest.mark.negative_control("strategy:noloco")
@pytest.mark.parametrize("broken", [SamePairs(PERIOD, seed=1), NoLoCo(PERIOD, gamma=0, seed=1)], ids=str)
def test_pairs_that_never_change_and_a_missing_pull_show(broken):
    assert far_from(broken, 4, expected(NoLoCo(PERIOD, seed=1), 4)) > 1e-3


@pytest.mark.parametrize("n", [2, 5, 8])
def test_pairs_are_mutual_and_change(n):
    drawn = groups(NoLoCo(), n)
    assert all(len(pairs) == n // 2 for pairs in drawn)
    assert all(len({rank for pair in pairs for rank in pair}) == 2 * (n // 2) for pairs in drawn)
    assert n == 2 or len({tuple(pairs) for pairs in drawn}) > 1
    assert groups(NoLoCo(seed=1), n) != drawn or n == 2


def test_still_workers_agree_on_their_mean():
    """Without gradients the pull keeps the mean and brings workers together (the paper's theorem on the variance)."""
    start = np.random.default_rng(0).normal(size=(6, 8))
    job = bowl_job("sgd(lr=0)")
    states = {r: start[r] for r in range(6)}

    class Started(NoLoCo):
        def worker_state(self, me):
            state = super().worker_state(me)
            state.model[:] = states[me.rank]
            return state

    run = run_strategy(Started(1), 6, 120, job=job, replicas=start)
    assert np.abs(run.replicas - start.mean(0)).max() < 1e-3
    assert np.abs(run.replicas.mean(0) - start.mean(0)).max() < 1e-13


def test_an_outer_step_sends_one_model():
    run = run_strategy(f"noloco({PERIOD})", 4, 3 * PERIOD, job=JOB)
    assert [run.totals[rank].sent_bytes for rank in range(4)] == [3 * 8 * 8] * 4
    odd = run_strategy(f"noloco({PERIOD})", 3, PERIOD, job=JOB)
    assert sorted(odd.totals[rank].sent_bytes for rank in range(3)) == [0, 8 * 8, 8 * 8]


def test_only_the_partner_of_a_slow_worker_waits():
    run = run_strategy(f"noloco({PERIOD})", 4, PERIOD, job=JOB, compute="speeds(constant(1), (9, 1, 1, 1))")
    partner = NoLoCo().partner(4, 0, 1)
    fast = [rank for rank in (1, 2, 3) if rank != partner]
    sent = {one.message.source: one.t for one in run.sent("change")}
    assert {sent[rank] for rank in fast} == {float(PERIOD)}
    assert sent[0] == 9 * PERIOD


@pytest.mark.parametrize("at", [0.05, 0.31, 0.6])
def test_the_partner_of_a_dead_worker_goes_on_alone(at):
    run = run_strategy("noloco(2)", 4, 20, job=JOB, faults=[f"dies(1, {at})"], network="link(1e4, 0.01)")
    assert {rank: run.nodes[rank].step for rank in (0, 2, 3)} == {0: 20, 2: 20, 3: 20}
    assert np.isfinite(run.result).all()


def test_a_lost_change_ends_the_run_with_a_sentence():
    with pytest.raises(PeerLost, match=r"the change of worker \d at step \d+ was lost: worker \d received the change"):
        run_strategy("noloco(1)", 2, 20, job=JOB, faults=["drops(0, 1, 5)"])


def test_conforms():
    check_strategy(Strategy.parse("noloco(5)"), workers=(1, 2, 3), alone_is_plain=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("noloco(0)", "period must be >= 1 local steps, got 0; 50 is usual"),
        ("noloco(lr=0)", r"lr of noloco must be > 0 and finite, got 0.0; 0.7 is usual"),
        ("noloco(momentum=1)", r"momentum of noloco must be in \[0, 1\), got 1.0; 0.5 is usual"),
        ("noloco(gamma=-1)", "gamma of noloco must be >= 0 and finite, got -1.0; leave it out for lr"),
        ("noloco(seed=-1)", "seed of noloco must be >= 0, got -1; 0 is usual"),
    ],
)
def test_impossible_settings_are_refused(text, message):
    with pytest.raises(ConfigurationError, match=message):
        Strategy.parse(text)
