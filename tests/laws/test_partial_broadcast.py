"""Partial communication: everything at share 1, nothing lost when deferred, and much lost when dropped."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flockstep.arrays.exact_sum import GRID
from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.numpy import Model
from flockstep.strategies.broadcast import StepCount
from flockstep.strategies.partial_broadcast import PartialBroadcast
from flockstep.testing.strategies import equal_bits, run_strategy, small_job

OPTIMIZERS = ["sgd(lr=0.1)", "sgd(lr=0.05, momentum=0.9)", "adam(lr=0.02)"]


def own_movement(run, peer):
    """What everyone else sent to a worker altogether, per sender, in whole units of the grid."""
    senders = [rank for rank in range(len(run.replicas)) if rank != peer]
    sent = {rank: [s.message.array for s in run.sent("update", source=rank) if s.to == peer] for rank in senders}
    return {rank: sum(np.rint(np.float64(a) / GRID).astype(np.int64) for a in arrays) for rank, arrays in sent.items()}


@pytest.mark.parametrize("rest", ["drop", "defer"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scale", [1, 0.25])
def test_share_one_is_broadcast_in_every_bit_and_moment(rest, optimizer, scale):
    options = {"steps": 12, "job": small_job(optimizer)}
    one = run_strategy(f"partial(1, {rest}, {scale})", **options, result="rank0")
    other = run_strategy(f"broadcast({scale})", **options, result="rank0")
    assert equal_bits(*one.replicas, *other.replicas)
    assert one.events == other.events


@given(
    n=st.integers(2, 5),
    share=st.sampled_from([0.01, 0.25, 0.7]),
    seed=st.integers(0, 10**6),
    compute=st.sampled_from(["constant(0.1)", "pareto(0.05, 1.1)", "speeds(exponential(0.05), (1, 7, 2))"]),
    network=st.sampled_from(["ideal", "link(300, 0.4)", "two_tier(2, 1e4, 0, 150, 2)"]),
    optimizer=st.sampled_from(OPTIMIZERS),
    dtype=st.sampled_from(["float32", "float64"]),
)
def test_deferred_updates_all_arrive_in_the_end(n, share, seed, compute, network, optimizer, dtype):
    """Statement 1 after the flush, and each peer has been sent the same sum, though in other portions."""
    job = small_job(optimizer, dtype)
    run = run_strategy(f"partial({share})", n, 8, job=job, seed=seed, compute=compute, network=network)
    assert equal_bits(*run.replicas)
    assert set(run.deliveries().values()) == {8}
    moved = [own_movement(run, peer) for peer in range(n)]
    for sender in range(n):
        assert len({moved[peer][sender].tobytes() for peer in range(n) if peer != sender}) == 1
    assert not any(node.state.deferred.any() or any(node.state.counts) for node in run.nodes.values())


def test_deferred_updates_without_a_movement_count_too():
    run = run_strategy("partial(0.25)", 4, 8, job=small_job("sgd(lr=0)"))
    assert set(run.deliveries().values()) == {8}


def test_dropped_updates_are_missing_from_the_record():
    run = run_strategy("partial(0.25, drop)", 4, 20)
    assert sum(run.deliveries().values()) == len(run.sent("update")) < 4 * 3 * 20


@pytest.mark.parametrize("rest", ["drop", "defer"])
@pytest.mark.parametrize("share", [0.05, 0.25, 0.7, 1])
def test_messages_are_the_share_of_all(rest, share):
    n, steps = 5, 100
    run = run_strategy(f"partial({share}, {rest})", n, steps)
    all_of_them = n * (n - 1) * steps
    flush = n * (n - 1) if rest == "defer" else 0  # at most one more for each peer
    count, allowed = len(run.sent("update")), 5 * np.sqrt(all_of_them * share * (1 - share))
    assert share * all_of_them - allowed <= count <= share * all_of_them + allowed + flush
    workers = run.totals.values()
    assert sum(totals.messages_sent for totals in workers) == count + n * (n - 1)  # and the leave messages
    assert (
        sum(totals.sent_bytes for totals in workers)
        == sum(totals.received_bytes for totals in workers)
        == count * 18 * 4
    )


class NoFlush(PartialBroadcast):
    """Negative control: does not send the deferred updates at the end."""

    async def finish(self, me):
        me.state.deferred[:] = 0
        me.state.counts[:] = [0] * me.workers
        await super().finish(me)


class PaysTwice(PartialBroadcast):
    """Negative control: forgets that it has paid, now and then."""

    async def worker(self, me):
        await super().worker(me)
        for peer in me.peers[:1]:
            me.send(peer, "update", me.state.deferred[peer].astype(me.params.dtype), StepCount())


@pytest.mark.negative_control("strategy:partial")
@pytest.mark.parametrize("broken", [NoFlush(0.1), PaysTwice(0.1)], ids=lambda s: type(s).__name__)
def test_another_rule_breaks_statement_1(broken):
    assert not equal_bits(*run_strategy(broken, 4, 8).replicas)


class Slope(Model):
    """Loss x * w: the gradient is the mean of the samples, wherever w is."""

    dtype = "float64"
    shapes: ClassVar = {"w": (1,)}

    def initial(self, random):
        return {"w": np.zeros(1)}

    def gradients(self, params, x, y, out):
        out["w"][...] = x.mean(axis=1)
        return np.zeros(len(x))

    def outputs(self, params, x):
        return x * params["w"]

    def loss(self, params, outputs, y):
        return 0.0


def moved(strategy, slopes, compute="exponential(0.05)", steps=40):
    """How far each replica moved in units of the learning rate, where worker i's gradient is slopes[i]."""
    samples = np.repeat(np.float64(slopes), 8)[:, None]
    job = Job(
        Slope, lambda: Data(samples, samples, samples[:1], samples[:1]), "sgd(lr=0.5)", metric=lambda *_: 0.0, batch=4
    )
    return -run_strategy(strategy, len(slopes), steps, job=job, compute=compute).replicas[:, 0] / 0.5


@pytest.mark.parametrize("share", [0.05, 0.5, 1])
def test_averaging_what_arrived_moves_as_far_as_one_worker_whatever_arrives(share):
    """The weights of a step sum to one: with equal gradients a step is one worker's; sums, as in drop, go further."""
    assert np.allclose(moved(f"partial({share}, average)", [1, 1, 1, 1]), 40)
    assert moved(f"partial({share}, drop)", [1, 1, 1, 1]).mean() > 40 * (1 + 1.5 * share)


def test_averaging_what_arrived_weighs_all_that_is_there_alike():
    """Everything arrives: the mean of gradients 1 and 3, but for the steps at the ends; nothing does: each its own."""
    assert np.allclose(moved("partial(1, average)", [1, 3], "constant(0.05)"), 80, atol=2)
    assert np.allclose(moved("partial(0.000001, average)", [1, 3]), [40, 120])
