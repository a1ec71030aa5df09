"""Synchronous all-reduce against plain numpy."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from flockstep.arrays.schema import slices
from flockstep.strategies import all_reduce, overlap_trial
from flockstep.strategies.all_reduce import AllReduce
from flockstep.strategies.bucketed import Bucketed
from flockstep.testing.strategies import GradientSource, equal_bits, run_strategy, small_job

STEPS = 15


def oracle(n, optimizer="sgd(lr=0.1)", steps=STEPS):
    """One model, the gradients of all workers in the ring's order of addition, one step with their mean."""
    source = GradientSource(n, small_job(optimizer))
    w = source.start()
    stepper = source.stepper(w)
    for _ in range(steps):
        g = [source.gradient(rank, w) for rank in range(n)]
        mean = np.empty_like(w)
        for chunk, part in enumerate(slices(len(w), n)):
            mean[part] = g[chunk][part]
            for hop in range(1, n):
                mean[part] += g[(chunk + hop) % n][part]
        stepper.step(w, mean / np.float32(n))
    return w


@pytest.mark.oracle("strategy:all_reduce")
@pytest.mark.parametrize("n", [2, 3, 4, 5, 7])
@pytest.mark.parametrize("optimizer", ["sgd(lr=0.1)", "sgd(lr=0.1, momentum=0.9)", "adam(lr=0.01)"])
def test_equals_one_model_stepped_by_the_mean_gradient(n, optimizer):
    run = run_strategy("all_reduce", n, STEPS, job=small_job(optimizer))
    assert equal_bits(oracle(n, optimizer), run.result, *run.replicas)


@pytest.mark.parametrize("compute", ["constant(1)", "pareto(0.1, 1.1)", "speeds(exponential(0.1), (1, 9))"])
@pytest.mark.parametrize("network", ["ideal", "link(100, 0.5)", "switch(1e3, 0.1, 50)"])
def test_time_changes_no_bit(compute, network):
    assert equal_bits(run_strategy("all_reduce", 3, STEPS, compute=compute, network=network).result, oracle(3))


class SumNotMean(AllReduce):
    """Negative control: the sum of the gradients."""

    async def worker(self, me):
        while me.training:
            gradient = await me.gradient()
            await self.collective.all_reduce(me, gradient)
            me.optimizer_step(gradient)


class MeanOfHalves(AllReduce):
    """Negative control: the right mean, divided before it is summed, which rounds differently for n = 3."""

    async def worker(self, me):
        while me.training:
            gradient = await me.gradient()
            gradient /= me.workers
            await self.collective.all_reduce(me, gradient)
            me.optimizer_step(gradient)


@pytest.mark.negative_control("strategy:all_reduce")
@pytest.mark.parametrize("broken", [SumNotMean(), MeanOfHalves()], ids=lambda s: type(s).__name__)
def test_the_oracle_notices_another_rule(broken):
    run = run_strategy(broken, 3, STEPS)
    assert equal_bits(*run.replicas)
    assert not equal_bits(run.result, oracle(3))


@dataclass(frozen=True)
class Overlapping(AllReduce):
    """As in a script's own loop: parts of the gradient are passed on, and one worker revises one of its gradients."""

    revised: int = 10**6
    """Number of steps of worker 1 before that gradient."""
    sent: tuple[list[int], ...] = ()
    """Sizes in bytes of the messages of each step."""

    async def worker(self, me):
        step, send = me.optimizer_step, me.port.send
        me.overlaps = True

        def stepped(gradient, in_place=False):
            step(gradient, in_place)
            if in_place:  # as an optimizer may that clips it
                gradient[:] = np.nan
            me.revised = me.rank == 1 and me.step == self.revised

        def counted(to, message):
            self.sent[me.step].append(message.payload_bytes)
            send(to, message)

        me.optimizer_step, me.port.send = stepped, counted
        await super().worker(me)


@pytest.mark.parametrize("collective", ["ring", "recursive_doubling", "rabenseifner", "binomial_tree", "auto"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_parts_that_travel_early_give_the_mean_and_are_sent_again_if_one_is_revised(collective, n, monkeypatch):
    monkeypatch.setattr(all_reduce, "SIZES", Bucketed(cap=28e-6, first=12e-6))
    plain = run_strategy(f"all_reduce({collective})", n, STEPS)
    sent = tuple([] for _ in range(STEPS + 1))
    for revised in (10**6, 6):
        strategy = Overlapping(AllReduce.parse(f"all_reduce({collective})").collective, revised=revised, sent=sent)
        run = run_strategy(strategy, n, STEPS)
        assert equal_bits(run.result, *run.replicas)
        np.testing.assert_allclose(run.result, plain.result, rtol=1e-4, atol=1e-6)
        assert max(map(max, filter(None, sent))) <= plain.result.nbytes, "no message is larger than the model"
        early, late = (sum(map(len, sent[at : at + 3])) for at in (2, STEPS - 3))
        assert (late < early / 2) == (revised == 6), "whole gradients take fewer messages than four buckets"
        for step in sent:
            step.clear()


@pytest.mark.parametrize("collective", ["ring", "by_host", "rabenseifner"])
def test_the_bits_do_not_depend_on_when_gradients_travel(collective, monkeypatch):
    """During the backward pass in all steps; in turn; and after it, where that seems faster."""
    monkeypatch.setattr(all_reduce, "SIZES", Bucketed(cap=20e-6, first=12e-6))
    found, late = [], []
    for tried, slow in ((10**6, ""), (3, ""), (3, "during")):
        monkeypatch.setattr(overlap_trial, "TRIED", tried)
        strategy = Timed(AllReduce.parse(f"all_reduce({collective})").collective, slow=slow, late=late)
        run = run_strategy(strategy, 3, STEPS, job=small_job("sgd(lr=1)"))  # every bit of a mean matters
        assert equal_bits(run.result, *run.replicas)
        found.append(run.result)
        assert late == {10**6: [], 3: [*range(3, 6), *(range(6, STEPS) if slow else [])]}[tried]
        late.clear()
    assert equal_bits(*found)


@dataclass(frozen=True)
class Timed(AllReduce):
    """As in a script's own loop, with a clock of its own for each worker."""

    slow: str = ""
    """"during": worker 0 finds steps slow whose gradients travel during the backward pass; "": the others."""
    late: list[int] = field(default_factory=list)
    """Steps of worker 0 whose gradients travel after the backward pass."""

    async def worker(self, me):
        gradient, seconds = me.gradient, [0.0]
        me.overlaps, me.now = True, lambda: seconds[0]

        def whole():
            if me.rank == 0:
                self.late.append(me.step)
            seconds[0] += 5 if self.slow else 50
            return gradient()

        step = me.optimizer_step

        def stepped(mean, in_place):
            seconds[0] += 10 * (1 + me.rank)
            step(mean, in_place)

        me.gradient, me.optimizer_step = whole, stepped
        if me.rank == 0 and self.slow:
            parts = me.gradient_parts

            def in_parts(*arguments, **options):
                seconds[0] += 500
                return parts(*arguments, **options)

            me.gradient_parts = in_parts
        await super().worker(me)
