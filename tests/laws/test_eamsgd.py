"""Elastic averaging with momentum against plain numpy: the order of its steps, and whose momentum it is."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from flockstep.errors import CompositionError
from flockstep.simulation.compute import ComputeModel
from flockstep.strategies.eamsgd import ElasticMomentum
from flockstep.testing.strategies import COMPUTE, GradientSource, equal_bits, run_strategy, small_job

F = np.float32


def oracle(n, period, alpha, momentum, steps, order="survey", decay=0.0):
    """Replicas, velocities and center where messages take no time: exchanges happen one after the other."""
    source = GradientSource(n, small_job())
    w, center, g = [source.start() for _ in range(n)], source.start(), [source.start() for _ in range(n)]
    v = [np.zeros_like(center) for _ in range(n)]
    durations = [ComputeModel.parse(COMPUTE).stream(0, rank) for rank in range(n)]
    due, late = [(0.0, rank, 0) for rank in range(n)], {}
    while due:
        t, rank, step = heapq.heappop(due)
        if step > 0:
            if decay:
                g[rank] = w[rank] * F(decay) + g[rank]
            w[rank] -= F(0.1) * g[rank]
            v[rank] -= F(0.1) * g[rank]
            w[rank] -= late.pop(rank, 0)
        if step < steps:
            if step % period == 0:
                delta = F(alpha) * (w[rank] - center)
                center += delta
                if order == "survey":
                    w[rank] -= delta
                else:
                    late[rank] = delta
            v[rank] *= F(momentum)
            w[rank] += v[rank]
            g[rank] = source.gradient(rank, w[rank])
            heapq.heappush(due, (t + next(durations[rank]), rank, step + 1))
    return w, v, center


def agrees(strategy, expected, job, n=3, steps=15):
    """Whether replicas, velocities and center end as expected, in every bit."""
    run = run_strategy(strategy, n, steps, job=job, network="ideal")
    w, v, center = expected
    states = [run.nodes[rank].state.v for rank in range(n)]
    return equal_bits(run.server, center) and all(
        equal_bits(run.replicas[rank], w[rank]) and equal_bits(states[rank], v[rank]) for rank in range(n)
    )


@pytest.mark.parametrize("order", ["survey", "paper"])
@pytest.mark.parametrize(("period", "alpha", "momentum"), [(1, 0.3, 0.9), (3, 0.225, 0.5), (4, 0.1, 0.99)])
@pytest.mark.oracle("strategy:eamsgd")
def test_equals_the_oracle(period, alpha, momentum, order):
    strategy = ElasticMomentum(period, alpha, order, momentum)
    assert agrees(strategy, oracle(3, period, alpha, momentum, 15, order), small_job())


def test_the_jobs_momentum_is_not_applied_besides_and_its_weight_decay_is():
    strategy = ElasticMomentum(3, 0.3, momentum=0.8)
    for text in ("sgd(lr=0.1, momentum=0.5)", "sgd(lr=0.1, momentum=0.5, nesterov=True)"):
        assert agrees(strategy, oracle(3, 3, 0.3, 0.8, 15), small_job(text))
    decayed = oracle(3, 3, 0.3, 0.8, 15, decay=0.01)
    assert agrees(strategy, decayed, small_job("sgd(lr=0.1, weight_decay=0.01)"))
    assert not agrees(strategy, decayed, small_job())


class Polyak(ElasticMomentum):
    """Negative control: the gradient is that of the point before the momentum's move."""

    async def step(self, me):
        gradient = (await me.gradient()).copy()
        me.state.v *= F(self.momentum)
        me.params += me.state.v
        me.params -= F(me.lr) * gradient
        me.state.v -= F(me.lr) * gradient


class Doubled(ElasticMomentum):
    """Negative control: the job's optimizer steps, with a momentum of its own."""

    async def step(self, me):
        me.state.v *= F(self.momentum)
        me.params += me.state.v
        gradient, before = await me.gradient(), me.params.copy()
        me.optimizer_step(gradient)
        me.state.v += me.params - before


@pytest.mark.parametrize("broken", [Polyak, Doubled])
@pytest.mark.negative_control("strategy:eamsgd")
def test_the_oracle_notices_another_momentum(broken):
    expected = oracle(3, 3, 0.2, 0.8, 15)
    job = small_job("sgd(lr=0.1, momentum=0.5)")
    assert agrees(ElasticMomentum(3, 0.2, momentum=0.8), expected, job)
    assert not agrees(broken(3, 0.2, momentum=0.8), expected, job)


@pytest.mark.parametrize("optimizer", ["adam(lr=0.01)", "sgd(lr=0.1, momentum=0.9, dampening=0.1)"])
def test_an_optimizer_that_it_cannot_stand_in_for_is_refused(optimizer):
    with pytest.raises(CompositionError, match="eamsgd has its own momentum"):
        run_strategy("eamsgd", 2, 3, job=small_job(optimizer))
