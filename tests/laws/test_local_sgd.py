"""Local SGD against plain numpy: rounds, what an average keeps, and when it is synchronous SGD."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flockstep.arrays.schema import slices
from flockstep.errors import ConfigurationError
from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.numpy import QuadraticModel
from flockstep.records.events import EvaluationEvent
from flockstep.strategies.base import Strategy
from flockstep.strategies.local_sgd import LocalSGD
from flockstep.testing.strategies import GradientSource, Watched, bowl_job, equal_bits, run_strategy, small_job
from flockstep.workloads.sampler import Sampler


def oracle(n, period, steps, optimizer="sgd(lr=0.1)"):
    """n models that step on their own; every `period` steps each becomes the mean, summed in the ring's order."""
    source = GradientSource(n, small_job(optimizer))
    w = [source.start() for _ in range(n)]
    steppers = [source.stepper(replica) for replica in w]
    for step in range(1, steps + 1):
        for rank in range(n):
            steppers[rank].step(w[rank], source.gradient(rank, w[rank]))
        if step % period == 0:
            mean = np.empty_like(w[0])
            for chunk, part in enumerate(slices(len(mean), n)):
                mean[part] = w[chunk][part]
                for hop in range(1, n):
                    mean[part] += w[(chunk + hop) % n][part]
            for replica in w:
                replica[:] = mean / np.float32(n)
    return w


@pytest.mark.oracle("strategy:local_sgd")
@pytest.mark.parametrize("optimizer", ["sgd(lr=0.1)", "sgd(lr=0.1, momentum=0.9)", "adam(lr=0.02)"])
@pytest.mark.parametrize(("n", "period", "steps"), [(2, 1, 7), (3, 4, 17), (4, 5, 20), (4, 30, 20)])
def test_equals_the_oracle(optimizer, n, period, steps):
    run = run_strategy(f"local_sgd({period})", n, steps, job=small_job(optimizer))
    for replica, expected in zip(run.replicas, oracle(n, period, steps, optimizer), strict=True):
        assert equal_bits(replica, expected)


@pytest.mark.parametrize(("steps", "period"), [(20, 1), (20, 5), (19, 5), (4, 5), (21, 10)])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_rounds_are_the_whole_periods(steps, period, n):
    run = run_strategy(f"local_sgd({period})", n, steps)
    rounds = steps // period
    assert {totals.messages_sent for totals in run.totals.values()} == {rounds * 2 * (n - 1)}
    assert sum(totals.sent_bytes for totals in run.totals.values()) == rounds * 2 * (n - 1) * 18 * 4
    assert set(run.deliveries().values()) == ({rounds * period} if rounds else set())


@pytest.mark.parametrize("collective", ["ring", "recursive_doubling"])
def test_replicas_are_equal_after_an_average_and_apart_before(collective):
    run = run_strategy(f"local_sgd(4, {collective})", 4, 12, evaluate_every=1)
    divergence = [snapshot.divergence for snapshot in run.of(EvaluationEvent)]
    assert [step for step, apart in enumerate(divergence) if apart == 0] == [0, 4, 8, 12]
    assert not equal_bits(*run_strategy("local_sgd(4)", 4, 13).replicas)


def test_an_average_keeps_the_mean():
    job = bowl_job("sgd(lr=0)")
    start = np.random.default_rng(0).normal(size=(4, 8))
    run = run_strategy("local_sgd(3)", 4, 9, job=job, replicas=start)
    assert equal_bits(*run.replicas)
    assert np.allclose(run.replicas[0], start.mean(0), rtol=0, atol=1e-15)
    whole = np.random.default_rng(0).integers(-8, 8, (4, 8)) * 4.0  # sums and quarters of these are exact
    run = run_strategy("local_sgd(3)", 4, 9, job=job, replicas=whole)
    assert np.array_equal(run.replicas[0], whole.mean(0))


class TakesOne(LocalSGD):
    """Negative control: everyone takes the parameters of worker 0, so the mean is lost."""

    async def worker(self, me):
        while me.training:
            me.optimizer_step(await me.gradient())
            if me.step % self.period == 0:
                me.params *= me.rank == 0
                await self.collective.all_reduce(me, me.params)


@pytest.mark.negative_control("strategy:local_sgd")
def test_the_mean_notices_another_rule():
    start = np.random.default_rng(0).normal(size=(4, 8))
    run = run_strategy(TakesOne(3), 4, 9, job=bowl_job("sgd(lr=0)"), replicas=start)
    assert equal_bits(*run.replicas)
    assert np.abs(run.replicas[0] - start.mean(0)).max() > 0.1


SIZES = (120, 60, 36, 24)
PARTS = np.split(np.arange(240), np.cumsum(SIZES)[:-1])
"""Parts of unequal size, as the split dirichlet deals them out."""


class Unequal(Watched):
    """A simulation whose workers hold parts of unequal size, `PARTS`."""

    def __init__(self, engine, plan, *rest):
        super().__init__(engine, replace(plan, parts=PARTS), *rest)


def one_apart():
    """Bowls of one curvature whose optimum is 1 for the smallest part, a tenth of all samples, and 0 for the others."""
    x = np.zeros((240, 2))
    x[PARTS[3]] = 1

    def metric(outputs, targets):
        return float(np.mean(np.square(outputs)))

    data = Data(x, np.zeros(240), x, np.zeros(240))
    return Job(lambda: QuadraticModel(np.ones(2), np.zeros(2)), lambda: data, "sgd(lr=0.1)", metric=metric, batch=4)


@pytest.mark.parametrize(("weighting", "optimum"), [("samples", 0.1), ("equal", 0.25)])
@pytest.mark.parametrize("outer", ["nesterov", "bmuf"])
def test_parts_of_unequal_size_weigh_as_they_should(weighting, optimum, outer):
    """FedAvg (McMahan et al. 2017, algorithm 1): w ← sum_k n_k / n w_k, whose fixed point is the mean over samples."""
    text = f"local_sgd(5, outer_optimizer={outer}, weighting={weighting})"
    run = run_strategy(text, 4, 400, job=one_apart(), simulation=Unequal)
    assert run.replicas == pytest.approx(optimum, abs=1e-3)


def test_weights_by_samples_equal_the_oracle():
    job = small_job(dtype="float64")
    engine = GradientSource(4, job)
    w, samplers = [engine.start() for _ in range(4)], [Sampler(part, 8, 0, rank) for rank, part in enumerate(PARTS)]
    for step in range(1, 21):
        for rank in range(4):
            out = np.empty_like(w[rank])
            engine.engine.gradient(w[rank], samplers[rank].next(), out, rank)
            w[rank] -= 0.1 * out
        if step % 4 == 0:
            mean = sum(size / 240 * replica for size, replica in zip(SIZES, w, strict=True))
            w = [mean.copy() for _ in w]
    run = run_strategy("local_sgd(4, weighting=samples)", 4, 20, job=job, simulation=Unequal)
    assert np.allclose(run.replicas, np.stack(w), rtol=1e-12, atol=1e-14)


def test_equal_parts_weigh_alike_in_every_bit():
    weighed, plain = (run_strategy(f"local_sgd(4, weighting={text})", 4, 20) for text in ("samples", "equal"))
    assert equal_bits(weighed.replicas, plain.replicas)


def test_weights_by_samples_need_a_declared_job():
    assert Strategy.parse("local_sgd(weighting=samples)").traits.needs_job
    with pytest.raises(ConfigurationError, match="weighting must be equal or samples, got bytes; leave it out"):
        LocalSGD(weighting="bytes")
