"""Schedules: exact sequences, equal noise for a smaller rate and a larger batch, and many workers as one."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from flockstep import registry
from flockstep.errors import CompositionError
from flockstep.frameworks.numpy import NumpyEngine
from flockstep.records.config import RunConfig
from flockstep.records.events import EvaluationEvent
from flockstep.runtime.setup import prepare
from flockstep.schedules import Extent, Schedule, Timetable
from flockstep.schedules.batch_increase import BatchIncrease
from flockstep.schedules.constant import Constant
from flockstep.schedules.cosine import Cosine
from flockstep.schedules.goyal import Goyal
from flockstep.schedules.linear_warmup import LinearWarmup
from flockstep.schedules.step_decay import StepDecay
from flockstep.testing.expressions import check_component
from flockstep.testing.strategies import equal_bits, run_strategy, small_job
from flockstep.workloads.sampler import Sampler


def timetable(schedule, steps=30, workers=4, lr=0.1):
    return Timetable.over_steps(Schedule.parse(schedule), lr, 8, workers, 240, steps)


def rates(schedule, steps=30):
    table = timetable(schedule, steps)
    return [table.lr_at(step) for step in range(steps)]


def trained(schedule, steps=30, job=None):
    """Plain numpy: all-reduce SGD of 4 workers, at a learning rate per step."""
    job = job or small_job("sgd(lr=0.1, momentum=0.9)", "float64")
    engine = NumpyEngine(job, 0)
    params, v = engine.initial(), np.zeros(engine.schema.size)
    seen = [list(order) for order in orders(engine, steps)]
    for step, lr in enumerate(schedule):
        gradients = []
        for worker in range(4):
            out = np.empty_like(params)
            engine.gradient(params, np.array(seen[worker][8 * step : 8 * step + 8]), out)
            gradients.append(out)
        v = 0.9 * v + np.mean(gradients, 0)
        params = params - lr * v
    return params


def orders(engine, steps):
    parts = np.array_split(np.arange(engine.train_size), 4)
    samplers = [Sampler(part, 8, 0, rank) for rank, part in enumerate(parts)]
    return [np.concatenate([sampler.next() for _ in range(steps)]) for sampler in samplers]


@pytest.mark.parametrize("name", registry.names("schedule"))
def test_conforms(name):
    """Text and data round trip; factors are positive and finite, and stages begin at 0 and ascend."""
    schedule = registry.load("schedule", name)()
    check_component(schedule)
    run = Extent(10.0, 4)
    assert all(0 <= schedule.factor(epoch, run) < math.inf for epoch in np.linspace(0, 12, 121))
    shares = [share for share, _ in schedule.stages]
    assert shares[0] == 0
    assert shares == sorted(set(shares))


@pytest.mark.oracle("schedule:constant")
def test_a_constant_scales_the_rate():
    assert rates(Constant(2.0)) == [0.2] * 30
    run = run_strategy("all_reduce", 4, 30, job=small_job(), schedule="constant(2)")
    assert equal_bits(run.result, run_strategy("all_reduce", 4, 30, job=small_job("sgd(lr=0.2)")).result)


@pytest.mark.oracle("schedule:step_decay")
def test_steps_of_the_decay_fall_where_they_should():
    expected = [0.1] * 15 + [0.1 * 0.1] * 8 + [0.1 * 0.1**2] * 7  # 22.5 steps are 3/4: the first step after it
    assert rates(StepDecay()) == pytest.approx(expected, rel=1e-15)
    for steps in (10, 50, 300, 1000):  # 0.6 of each is whole
        assert sum(r > 0.05 for r in rates("step_decay(at=(0.6,))", steps)) == 0.6 * steps


@pytest.mark.oracle("schedule:cosine")
def test_half_a_cosine():
    t = np.arange(30) / 30
    assert rates(Cosine()) == pytest.approx(0.1 * (1 + np.cos(np.pi * t)) / 2, rel=1e-12)
    assert Cosine(0.2).factor(99.0, Extent(10.0, 1)) == pytest.approx(0.2)
    assert [Cosine(0.2, 3).factor(epoch, Extent(10.0, 1)) for epoch in (0.0, 5.0, 10.0)] == pytest.approx([3, 1.8, 0.6])


@pytest.mark.oracle("schedule:linear_warmup")
def test_a_line_to_another_schedule():
    """Two epochs are 15 steps of 4 workers."""
    line = [0.1 * (0.1 + 0.9 * step / 15) for step in range(15)]
    assert rates(LinearWarmup(2.0)) == pytest.approx(line + [0.1] * 15, rel=1e-12)
    falls = rates("linear_warmup(2, then=step_decay(at=(0.8,)))")
    assert falls[:24] == pytest.approx(line + [0.1] * 9, rel=1e-12)
    assert falls[24:] == pytest.approx([0.01] * 6, rel=1e-12)
    steep = [0.1 * (0.5 + 2.5 * step / 15) for step in range(15)]
    assert rates("linear_warmup(2, 0.5, constant(3))") == pytest.approx(steep + [0.3] * 15, rel=1e-12)


@pytest.mark.oracle("schedule:goyal")
def test_the_sequence_of_a_gradual_warmup_is_exact():
    """By the same amount at every step from lr to k lr, within 2 epochs of 7.5 steps; then the decays."""
    ramp = [0.1 + 0.3 * step / 15 for step in range(15)]
    assert rates(Goyal(warmup=2, at=(0.8,))) == pytest.approx(ramp + [0.4] * 9 + [0.04] * 6, rel=1e-12)
    ramp = [0.1 + 0.7 * step / 15 for step in range(15)]
    assert rates(Goyal(8, 2, at=())) == pytest.approx(ramp + [0.8] * 15, rel=1e-12)
    assert rates(Goyal(warmup=2, gradual=False, at=())) == [0.1] * 15 + [0.4] * 15
    assert rates(Goyal(warmup=0, at=())) == [0.4] * 30


@pytest.mark.oracle("schedule:goyal", "schedule:step_decay")
@pytest.mark.parametrize("schedule", ["goyal(warmup=2, at=(0.8,))", "step_decay"])
def test_workers_and_servers_follow_the_schedule(schedule):
    """Heavy ball without the rate in its velocity needs no momentum correction (Goyal et al. 2017, remark 2)."""
    job = small_job("sgd(lr=0.1, momentum=0.9)", "float64")
    expected = trained(rates(schedule))
    for strategy in ("all_reduce", "ps(bsp)", "ps(bsp, shards=2)", "scatter_reduce"):
        run = run_strategy(strategy, 4, 30, job=job, schedule=schedule)
        np.testing.assert_allclose(run.result, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.negative_control("schedule:goyal", "schedule:step_decay", "schedule:constant")
@pytest.mark.parametrize("schedule", ["goyal(warmup=2, at=(0.8,))", "step_decay", "constant(2)"])
def test_a_run_without_the_schedule_is_noticed(schedule):
    expected = trained(rates(schedule))
    without = run_strategy("all_reduce", 4, 30, job=small_job("sgd(lr=0.1, momentum=0.9)", "float64"))
    assert np.abs(without.result - expected).max() > 1e-3


class Late(Cosine):
    """Wrong schedule: the warm-up ends one epoch late."""

    def factor(self, epoch, run):
        return super().factor(max(0.0, epoch - 1), run)


class Abrupt(LinearWarmup):
    """Wrong schedule: the warm-up is one jump."""

    def factor(self, epoch, run):
        return self.start if epoch < self.warmup else 1.0


@pytest.mark.negative_control("schedule:cosine", "schedule:linear_warmup")
@pytest.mark.parametrize(("right", "wrong"), [(Cosine(), Late()), (LinearWarmup(2.0), Abrupt(2.0))])
def test_another_sequence_is_noticed(right, wrong):
    assert np.abs(np.array(rates(right)) - rates(wrong)).max() > 1e-3


@pytest.mark.oracle("schedule:batch_increase")
def test_a_larger_batch_keeps_the_noise_of_a_smaller_rate():
    """lr / batch is the same after as many samples, and the updates are fewer by the exact ratio."""
    at = (0.3, 0.6, 0.8)
    facts = 0.1, 8, 4, 240, 10000 * 32 / 240
    falls, grows = Timetable(StepDecay(0.2, at), *facts), Timetable(BatchIncrease(5.0, at), *facts)
    assert falls.steps == 10000
    assert grows.steps == 3000 + 3000 / 5 + 2000 / 25 + 2000 / 125
    by_samples = {falls.samples_at(step): falls.lr_at(step) / falls.batch_at(step) for step in range(falls.steps)}
    for step in range(grows.steps):
        noise = grows.lr_at(step) / grows.batch_at(step)
        assert noise == pytest.approx(by_samples[grows.samples_at(step)], rel=1e-12)
    assert [grows.batch_at(step) for step in (0, 2999, 3000, 3599, 3600, 3679, 3680)] == [8, 8, 40, 40, 200, 200, 1000]
    assert grows.grows
    assert not falls.grows
    assert grows.samples_at(grows.steps) == falls.samples_at(falls.steps) == 80000


@pytest.mark.oracle("schedule:batch_increase")
def test_batches_in_a_run_are_of_the_sizes_that_the_schedule_says():
    """One worker against a loop in plain numpy over the same samples, in larger and larger batches."""
    job = small_job(dtype="float64")
    table = timetable("batch_increase(2, (0.5,))", 30, 1)
    run = run_strategy("all_reduce", 1, 30, job=job, schedule=table.schedule, evaluate_every=10)
    engine = NumpyEngine(job, 0)
    params, sampler = engine.initial(), Sampler(np.arange(engine.train_size), 8, 0, 0)
    for step in range(30):
        out = np.empty_like(params)
        engine.gradient(params, np.concatenate([sampler.next() for _ in range(table.batch_at(step) // 8)]), out)
        params = params - 0.1 * out
    assert equal_bits(run.result, params)
    assert [snapshot.samples for snapshot in run.of(EvaluationEvent)] == [0, 80, 160, 320]


@pytest.mark.negative_control("schedule:batch_increase")
def test_a_batch_that_stays_is_noticed():
    one, other = (
        run_strategy("all_reduce", 1, 30, job=small_job(), schedule=schedule).result
        for schedule in ("batch_increase(2, (0.5,))", "constant")
    )
    assert np.abs(one - other).max() > 1e-3


def test_growing_batches_take_their_time_and_run_with_others():
    """Virtual time counts samples; workers at different batches are computed apart; servers take part."""
    slow = run_strategy("all_reduce", 2, 20, compute="constant(0.01)", network="ideal", schedule="constant")
    longer = run_strategy(
        "all_reduce", 2, 20, compute="constant(0.01)", network="ideal", schedule="batch_increase(3, (0.5,))"
    )
    whole = [8] * 15 + [24] * 5  # 0.5 of the samples in 15 steps, the other half in 5
    assert longer.seconds == pytest.approx(0.01 * sum(whole) / 8)
    assert slow.seconds == pytest.approx(0.2)
    for strategy in ("asgd", "gossip", "easgd"):
        run = run_strategy(strategy, 4, 20, schedule="batch_increase(3, (0.5,))")
        assert np.isfinite(run.result).all()


def test_after_the_last_increase_the_rate_falls():
    schedule = BatchIncrease(5.0, (0.3, 0.6), increases=1)
    assert schedule.stages == ((0.0, 1.0), (0.3, 5.0))
    assert [schedule.factor(epoch, Extent(10.0, 1)) for epoch in (2, 4, 7)] == pytest.approx([1, 1, 0.2])


def test_a_stopped_run_goes_on_with_the_schedule():
    schedule = "goyal(warmup=20, at=())"  # in epochs: as long whatever the number of steps
    whole = run_strategy("all_reduce", 4, 20, schedule=schedule)
    half = run_strategy("all_reduce", 4, 10, schedule=schedule)
    resumed = run_strategy("all_reduce", 4, 20, schedule=schedule, resume=half.simulation.save())
    assert equal_bits(whole.result, resumed.result)


def test_a_resolved_configuration_says_the_same_run_again():
    for given in ({}, {"epochs": 3.0}, {"steps": 50}, {"steps": 50, "epochs": 7.0}):
        for schedule in ("goyal", "batch_increase(3)"):
            config = RunConfig(
                kind="simulate", job="softmax", strategy="all_reduce", workers=2, schedule=schedule, **given
            )
            _, plan, resolved = prepare(config)
            _, again, twice = prepare(resolved)
            assert plan.steps == again.steps == resolved.steps == twice.steps
            assert plan.timetable == again.timetable
    assert "--schedule goyal" in replace(resolved, schedule="goyal").command


def test_factors_of_gradients_need_batches_of_one_size():
    with pytest.raises(CompositionError, match="batches of a constant size, got the schedule batch_increase"):
        run_strategy("sufficient_factors", 2, 10, schedule="batch_increase")
    run_strategy("sufficient_factors", 2, 10, schedule="goyal")
