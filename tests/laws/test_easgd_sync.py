"""Synchronous elastic averaging against plain numpy: everything on the right-hand side is of one time."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.messages import MASTER
from flockstep.records.events import StepEvent
from flockstep.strategies.easgd_sync import SynchronousElasticAveraging
from flockstep.testing.strategies import GradientSource, equal_bits, run_strategy, small_job


def oracle(n, period, alpha, steps, optimizer="sgd(lr=0.1)"):
    """Replicas and center, from equations 5 and 6 as they stand."""
    source = GradientSource(n, small_job(optimizer))
    w, center = [source.start() for _ in range(n)], source.start()
    steppers = [source.stepper(replica) for replica in w]
    for step in range(steps):
        before, old = [replica.copy() for replica in w], center.copy()
        for rank in range(n):
            steppers[rank].step(w[rank], source.gradient(rank, before[rank]))
            if step % period == 0:
                delta = np.float32(alpha) * (before[rank] - old)
                w[rank] -= delta
                center += delta
    return w, center


def agrees(strategy, expected, n, steps=15, **options):
    """Whether replicas and center end as expected, in every bit."""
    run = run_strategy(strategy, n, steps, **options)
    replicas, center = expected
    return equal_bits(run.result, run.server, center) and all(
        equal_bits(one, other) for one, other in zip(run.replicas, replicas, strict=True)
    )


@pytest.mark.parametrize("optimizer", ["sgd(lr=0.1)", "sgd(lr=0.1, momentum=0.9)"])
@pytest.mark.parametrize(("n", "period", "alpha"), [(1, 1, 0.9), (3, 1, 0.3), (4, 3, 0.225), (5, 20, 0.1)])
@pytest.mark.oracle("strategy:easgd_sync")
def test_equals_the_oracle_whatever_time_takes(n, period, alpha, optimizer):
    expected, strategy = oracle(n, period, alpha, 15, optimizer), f"easgd_sync({period}, {alpha})"
    assert agrees(strategy, expected, n, job=small_job(optimizer))
    slow = {"network": "link(1000, 0.02)", "compute": "lognormal(0.05, 2)"}
    assert agrees(strategy, expected, n, job=small_job(optimizer), **slow)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_alpha_is_a_share_of_0_9_unless_it_is_given(n):
    assert agrees("easgd_sync", oracle(n, 1, 0.9 / n, 15), n)


@pytest.mark.parametrize(("steps", "period"), [(20, 1), (20, 5), (21, 5), (3, 10)])
def test_each_exchange_moves_two_models(steps, period):
    run = run_strategy(f"easgd_sync({period})", 3, steps)
    exchanges = -(-steps // period)
    for rank in range(3):
        totals = run.totals[rank]
        assert (totals.sent_bytes, totals.received_bytes) == (exchanges * 18 * 4, exchanges * 18 * 4)
        assert (totals.messages_sent, totals.messages_received) == (exchanges + 1, exchanges)
    assert run.nodes[MASTER].version == exchanges


def test_the_exchange_is_over_before_the_gradient_is():
    """Latencies of 0.02 s there and 0.02 s back hide behind gradients of 0.05 s."""
    run = run_strategy("easgd_sync", 3, 10, compute="constant(0.05)", network="link(1e9, 0.02)")
    times = [event.seconds for event in run.of(StepEvent) if event.rank == 0]
    assert np.allclose(times, 0.05 * np.arange(1, 11), rtol=0, atol=1e-9)


class GaussSeidel(SynchronousElasticAveraging):
    """Negative control: the center moves for one worker after the other, each of which sees where it is by then."""

    async def master(self, me):
        n, here = me.cluster.workers, {}
        async for message in me.messages():
            if message.tag == "model":
                here[message.source] = message
            if len(here) == n:
                for rank in range(n):
                    me.send(rank, "center", me.params)
                    me.params += self.rate(n) * (here[rank].payload - me.params)
                here.clear()


class AfterTheStep(SynchronousElasticAveraging):
    """Negative control: the elastic move is that of the point after the gradient step."""

    async def worker(self, me):
        while me.training:
            me.optimizer_step(await me.gradient())
            me.send(MASTER, "model", me.params)
            me.params -= self.rate(me.workers) * (me.params - (await me.receive("center", MASTER)).payload)


@pytest.mark.parametrize("broken", [GaussSeidel, AfterTheStep])
@pytest.mark.negative_control("strategy:easgd_sync")
def test_the_oracle_notices_another_order(broken):
    expected = oracle(3, 1, 0.3, 15)
    assert agrees(SynchronousElasticAveraging(1, 0.3), expected, 3)
    assert not agrees(broken(1, 0.3), expected, 3)
