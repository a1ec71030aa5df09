"""DeepSpark's adaptive elasticity against plain numpy: when alpha moves, how far it may, and what stays as in EASGD."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from flockstep.records.events import ScalarEvent
from flockstep.simulation.compute import ComputeModel
from flockstep.strategies.deepspark import AdaptiveElasticAveraging
from flockstep.strategies.elastic_averaging import largest_stable
from flockstep.testing.strategies import COMPUTE, GradientSource, bowl_job, equal_bits, run_strategy, small_job


def adapted(alpha, before, now, factor, improvement, low, high):
    """alpha after a window of mean loss `now` that follows one of `before`."""
    if before:
        alpha = alpha / factor if (before - now) / before > improvement else alpha * factor
    return min(max(alpha, low), high)


def oracle(n, period, alpha, factor, improvement, low, high, steps):
    """Replicas, center and every alpha used, where messages take no time: exchanges happen one after the other."""
    source = GradientSource(n, small_job())
    w, center, g = [source.start() for _ in range(n)], source.start(), [source.start() for _ in range(n)]
    durations = [ComputeModel.parse(COMPUTE).stream(0, rank) for rank in range(n)]
    rates, before, losses = [alpha] * n, [None] * n, [[] for _ in range(n)]
    due, used = [(0.0, rank, 0) for rank in range(n)], []
    while due:
        t, rank, step = heapq.heappop(due)
        if step > 0:
            w[rank] -= np.float32(0.1) * g[rank]
        if step < steps:
            if step % period == 0:
                if losses[rank]:
                    now = sum(losses[rank]) / len(losses[rank])
                    rates[rank] = adapted(rates[rank], before[rank], now, factor, improvement, low, high)
                    before[rank], losses[rank] = now, []
                used.append((rank, rates[rank]))
                delta = np.float32(rates[rank]) * (w[rank] - center)
                w[rank] -= delta
                center += delta
            batch = source._samplers[rank].next()
            losses[rank].append(float(source.engine.gradient(w[rank], batch, g[rank], rank)))
            heapq.heappush(due, (t + next(durations[rank]), rank, step + 1))
    return w, center, used


def agrees(strategy, expected, n=3, steps=40):
    run = run_strategy(strategy, n, steps, network="ideal")
    w, center, used = expected
    exact = equal_bits(run.server, center) and equal_bits(run.replicas, np.stack(w))
    return exact and np.array_equal(alphas(run), used)


def alphas(run):
    """(rank, alpha) of every exchange, in order."""
    return np.array([(figure.node, figure.value) for figure in run.of(ScalarEvent) if figure.name == "alpha"])


SETTING = (4, 0.2, 1.3, 0.04, 0.1, 0.4)


@pytest.mark.parametrize("setting", [SETTING, (3, 0.1, 2.0, 0.0, 0.02, 0.5), (5, 0.3, 1.1, 0.2, 0.25, 0.31)])
@pytest.mark.oracle("strategy:deepspark")
def test_equals_the_oracle(setting):
    period, alpha, factor, improvement, low, high = setting
    strategy = AdaptiveElasticAveraging(period, alpha, "survey", factor, improvement, low, high)
    expected = oracle(3, *setting, steps=40)
    assert len({rate for _, rate in expected[2]}) > 2
    assert agrees(strategy, expected)


@pytest.mark.parametrize("lr", [0.05, 1.0, 1.5, 1.9])
@pytest.mark.parametrize(
    "strategy", ["deepspark(1, 0.09, paper, 1.5, 0.9)", "deepspark(2, 0.09, paper, 3, largest=0.5)"]
)
def test_alpha_stays_where_the_papers_order_is_stable(strategy, lr):
    run = run_strategy(strategy, 3, 60, job=bowl_job(f"sgd(lr={lr})", dimension=1, noise=0.1))
    assert within(run, lr)
    assert alphas(run)[:, 1].min() >= 0.02
    assert np.isfinite(run.replicas).all()


def within(run, lr):
    return alphas(run)[:, 1].max() <= min(0.5, largest_stable(lr))


@pytest.mark.parametrize(("n", "most"), [(1, 0.5), (4, 0.45), (16, 0.1125), (64, 0.1)])
def test_at_most_twice_0_9_over_the_workers(n, most):
    assert AdaptiveElasticAveraging().ceiling(n, 0.1) == pytest.approx(most)


class WrongWay(AdaptiveElasticAveraging):
    """Negative control: leans on the others while it gets on well."""

    def __post_init__(self):
        object.__setattr__(self, "factor", 1 / self.factor)


class LastLoss(AdaptiveElasticAveraging):
    """Negative control: a window is its last step alone."""

    async def step(self, me):
        await super().step(me)
        me.state.total, me.state.count = me.loss, 1


class Unbounded(AdaptiveElasticAveraging):
    """Negative control: the learning rate does not count."""

    def ceiling(self, workers, lr):
        return 0.5


@pytest.mark.parametrize("broken", [WrongWay, LastLoss])
@pytest.mark.negative_control("strategy:deepspark")
def test_the_oracle_notices_another_rule(broken):
    period, alpha, factor, improvement, low, high = SETTING
    expected = oracle(3, *SETTING, steps=40)
    assert not agrees(broken(period, alpha, "survey", factor, improvement, low, high), expected)


@pytest.mark.negative_control("strategy:deepspark")
def test_the_bound_notices_who_does_not_keep_it():
    run = run_strategy(
        Unbounded(1, 0.09, "paper", improvement=0.9), 3, 60, job=bowl_job("sgd(lr=1.5)", dimension=1, noise=0.1)
    )
    assert not within(run, 1.5)
