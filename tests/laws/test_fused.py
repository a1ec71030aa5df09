"""Horovod's tensor fusion against plain numpy: one order for everyone, whatever is ready when."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.arrays.schema import FlatArray
from flockstep.collectives.ring import Ring
from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.numpy import Model
from flockstep.nodes import Worker
from flockstep.strategies.fused import Fused, TensorReady
from flockstep.testing.strategies import GradientSource, equal_bits, run_strategy

SIZES = (3, 5, 2, 7, 4)
STEPS = 8


class Bowls(Model):
    """A model with the loss ½ Σ (w - x)² over several tensors."""

    dtype = "float32"

    @property
    def shapes(self):
        return {f"t{i}": (size,) for i, size in enumerate(SIZES)}

    def initial(self, random):
        return {name: np.zeros(shape) for name, shape in self.shapes.items()}

    def gradients(self, params, x, y, out):
        start, losses = 0, 0.0
        for name, (size,) in self.shapes.items():
            apart = params[name][:, None, :] - x[:, :, start : start + size]
            out[name][...] = apart.mean(1)
            losses = losses + (apart**2).sum(2).mean(1) / 2
            start += size
        return losses

    def outputs(self, params, x):
        return np.concatenate([params[name] for name in self.shapes]) - x

    def loss(self, params, outputs, y):
        return float((outputs**2).sum(1).mean() / 2)


def several_tensors() -> Job:
    def data() -> Data:
        x = np.random.default_rng(7).normal(size=(240, sum(SIZES)))
        return Data(x, np.zeros(240), x[:8], np.zeros(8))

    return Job(Bowls, data, "sgd(lr=0.1)", metric=lambda o, t: float(np.mean(o**2)), higher_is_better=False, batch=4)


def oracle(n):
    source = GradientSource(n, several_tensors())
    w = source.start()
    for _ in range(STEPS):
        w -= np.float32(0.1) * np.mean([source.gradient(rank, w) for rank in range(n)], axis=0)
    return w


@pytest.mark.oracle("strategy:fused")
@pytest.mark.parametrize("fusion", ["64", "24e-6", "1e-6"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_equals_the_mean_gradient(n, fusion):
    run = run_strategy(f"fused({fusion})", n, STEPS, job=several_tensors())
    assert equal_bits(*run.replicas) or n == 1
    assert np.allclose(run.result, oracle(n), rtol=1e-5, atol=1e-6)


def named(run, rank=1):
    """The buffers that one worker was told to average, a list of tensors each."""
    return [entry.message.note.tensors for entry in run.sent("go/follow") if entry.to == rank]


def test_each_step_names_every_tensor_once_from_the_last_on():
    run = run_strategy("fused(1e-6)", 3, STEPS, job=several_tensors())
    assert named(run) == [[i] for i in (4, 3, 2, 1, 0)] * STEPS


def test_a_buffer_takes_what_is_ready_and_fits():
    """On a slow network everything is ready by the time the first tensor is averaged: 3 and 2 fit into 36 bytes."""
    run = run_strategy("fused(36e-6)", 2, 1, job=several_tensors(), compute="constant(0.001)", network="link(1000)")
    assert named(run) == [[4], [3, 2], [1, 0]]


class AnyOrder(Fused):
    """A simulation in which the backward pass completes tensors in another order on every worker."""

    async def announce(self, me: Worker, mean: FlatArray) -> None:
        mean[:] = await me.gradient()
        for tensor in me.random.permutation(len(me.tensors)):
            me.send(0, "ready/lead", None, TensorReady(int(tensor)))


def test_the_order_is_agreed_on_whatever_is_ready_first():
    run = run_strategy(AnyOrder(1e-6), 4, STEPS, job=several_tensors(), compute="exponential(0.05)")
    orders = [named(run, rank) for rank in range(1, 4)]
    assert orders[0] == orders[1] == orders[2]
    assert len({str(orders[0][5 * step : 5 * step + 5]) for step in range(STEPS)}) > 1
    assert np.allclose(run.result, oracle(4), rtol=1e-5, atol=1e-6)


class Unagreed(Fused):
    """Wrong strategy: every worker averages tensors in its own order."""

    async def worker(self, me: Worker) -> None:
        while me.training:
            mean = (await me.gradient()).copy()
            for tensor in me.random.permutation(len(me.tensors)):
                part = me.tensors[tensor]
                padded = np.zeros(max(SIZES), np.float32)
                padded[: part.stop - part.start] = mean[part]
                await Ring().average(me, padded)
                mean[part] = padded[: part.stop - part.start]
            me.optimizer_step(mean)


@pytest.mark.negative_control("strategy:fused")
def test_without_agreement_tensors_are_mixed_up():
    run = run_strategy(Unagreed(), 3, STEPS, job=several_tensors())
    assert not np.allclose(run.result, oracle(3), atol=1e-3)


@pytest.mark.parametrize("workers", [3, 4])
def test_news_of_the_next_step_may_come_before_this_one_is_over(workers):
    # Worker 1's last messages come from worker 0, next to it; worker 0's from far away.
    network = "two_tier(2, '10gbit', 0.000001, '1mbit', 0.1)"
    run = run_strategy("fused", workers, STEPS, job=several_tensors(), compute="constant(0.001)", network=network)
    assert equal_bits(run.result, *run.replicas)
    np.testing.assert_allclose(run.result, oracle(workers), atol=1e-5)
