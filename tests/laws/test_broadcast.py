"""FAST's Statement 1: every update delivered to everyone, whenever, and all replicas are equal, in every bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flockstep.arrays.exact_sum import GRID
from flockstep.errors import Diverged
from flockstep.runtime.node_creation import node_random
from flockstep.simulation.compute import ComputeModel
from flockstep.strategies.broadcast import Broadcast, StepCount
from flockstep.testing.strategies import (
    COMPUTE,
    GradientSource,
    Sent,
    Watched,
    bowl_job,
    equal_bits,
    run_strategy,
    small_job,
)

COMPUTES = ["constant(0.1)", "exponential(0.05)", "pareto(0.05, 1.1)", "speeds(lognormal(0.05, 1), (1, 7, 2))"]
NETWORKS = ["ideal", "1gbit", "link(300, 0.4)", "switch(1e4, 0.01, 400)", "two_tier(2, 1e4, 0, 150, 2)"]
OPTIMIZERS = ["sgd(lr=0.1)", "sgd(lr=0.05, momentum=0.9, nesterov=True)", "adam(lr=0.02)", "adagrad(lr=0.1)"]


def all_updates(run):
    """Every update once, in whole units of the grid: those that each worker sent to its first peer."""
    n = len(run.replicas)
    return [
        np.rint(np.float64(sent.message.array) / GRID).astype(np.int64)
        for rank in range(n)
        for sent in run.sent("update", source=rank)
        if sent.to == (0 if rank else 1)
    ]


def start_plus_all(run, start):
    """w_0 + Σ of all updates in integers, which no order can change."""
    units = np.rint(np.float64(start) / GRID).astype(np.int64)
    return (sum(all_updates(run), units) * GRID).astype(start.dtype)


@given(
    n=st.integers(2, 5),
    seed=st.integers(0, 10**6),
    compute=st.sampled_from(COMPUTES),
    network=st.sampled_from(NETWORKS),
    optimizer=st.sampled_from(OPTIMIZERS),
    dtype=st.sampled_from(["float32", "float64"]),
)
def test_statement_1(n, seed, compute, network, optimizer, dtype):
    job = small_job(optimizer, dtype)
    run = run_strategy("broadcast", n, 6, job=job, seed=seed, compute=compute, network=network)
    assert len(all_updates(run)) == 6 * n
    assert equal_bits(*run.replicas, start_plus_all(run, GradientSource(job=job, seed=seed).start()))


def oracle(n, chosen, steps, scale=1.0, defer=False, optimizer="sgd(lr=0.1)"):
    """The replicas at the end, (n, K), where messages take no time: sums of updates in whole units of the grid.

    `chosen(rank)` says who hears of an update at once; others later, with the next, if `defer`, or never.
    """
    source = GradientSource(n, small_job(optimizer))
    start = source.start()
    units = [np.rint(np.float64(start) / GRID).astype(np.int64) for _ in range(n)]
    deferred = np.zeros((n, n, len(start)), np.int64)
    inbox, params = [[] for _ in range(n)], [start.copy() for _ in range(n)]
    steppers = [source.stepper(start) for _ in range(n)]
    durations = [ComputeModel.parse(COMPUTE).stream(0, rank) for rank in range(n)]
    due, taken = [(next(durations[rank]), rank) for rank in range(n)], [0] * n

    def absorb(rank):
        units[rank] += sum(inbox[rank], np.zeros_like(units[rank]))
        inbox[rank] = []
        params[rank] = (units[rank] * GRID).astype(start.dtype)

    def pay(rank, peer):
        """As much as the dtype of the parameters can hold."""
        portion = np.rint(np.float64((deferred[rank, peer] * GRID).astype(start.dtype)) / GRID).astype(np.int64)
        inbox[peer].append(portion)
        deferred[rank, peer] -= portion

    while due:
        now, rank = min(due)
        due.remove((now, rank))
        stepped = params[rank].copy()
        steppers[rank].step(stepped, source.gradient(rank, params[rank]))
        update = np.rint(np.float64(np.float32(scale) * (stepped - params[rank])) / GRID).astype(np.int64)
        units[rank] += update
        peers = [peer for peer in range(n) if peer != rank]
        deferred[rank, peers] += update
        taken[rank] += 1
        for peer in chosen(rank):
            pay(rank, peer)
        for peer in peers if defer and taken[rank] == steps else []:
            while deferred[rank, peer].any():
                pay(rank, peer)
        if not defer:
            deferred[rank] = 0
        absorb(rank)
        if taken[rank] < steps:
            due.append((now + next(durations[rank]), rank))
    for rank in range(n):
        absorb(rank)
    return np.stack(params)


@pytest.mark.oracle("strategy:broadcast")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_equals_the_oracle(optimizer, scale):
    run = run_strategy(f"broadcast({scale})", 4, 15, job=small_job(optimizer), network="ideal")
    everyone = oracle(4, lambda rank: [peer for peer in range(4) if peer != rank], 15, scale, optimizer=optimizer)
    assert equal_bits(run.replicas, everyone)


@pytest.mark.oracle("strategy:partial")
@pytest.mark.parametrize("rest", ["drop", "defer"])
@pytest.mark.parametrize("share", [0.05, 0.5])
def test_partial_communication_equals_the_oracle(rest, share):
    run = run_strategy(f"partial({share}, {rest})", 4, 15, network="ideal")
    plan = run.simulation.plan
    draws = [node_random(plan.seed, rank) for rank in range(4)]

    def chosen(rank):
        return [peer for peer in range(4) if peer != rank and draws[rank].random() < share]

    assert equal_bits(run.replicas, oracle(4, chosen, 15, defer=rest == "defer"))


@pytest.mark.parametrize("n", [1, 2, 5])
def test_each_step_sends_one_model_to_everyone_else(n):
    run = run_strategy("broadcast", n, 15)
    for totals in run.totals.values():
        assert totals.sent_bytes == totals.received_bytes == 15 * (n - 1) * 18 * 4
        assert totals.messages_sent == totals.messages_received == 15 * (n - 1) + (n - 1)  # and the leave messages
    assert set(run.deliveries().values()) <= {15}
    assert len(run.deliveries()) == n * (n - 1)


def test_the_range_of_exact_sums_is_watched():
    with pytest.raises(Diverged, match="lower the learning rate or the scale"):
        run_strategy("broadcast(1e6)", 2, 20, job=bowl_job())


class DropsOne(Watched):
    """Negative control: the network loses the first update that worker 1 sends to worker 0."""

    def send(self, to, message):
        first = (message.tag, message.source, to, message.step) == ("update", 1, 0, 1)
        self.note(Sent(self.now, to, message)) if first else super().send(to, message)


class SendsTwice(Watched):
    """Negative control: the network delivers one update twice."""

    def send(self, to, message):
        super().send(to, message)
        if (message.tag, message.source, to, message.step) == ("update", 1, 0, 1):
            super().send(to, message)


@pytest.mark.parametrize("network", [DropsOne, SendsTwice])
@pytest.mark.parametrize("seed", range(5))
def test_a_lost_or_doubled_message_breaks_statement_1(network, seed):
    run = run_strategy("broadcast", 3, 6, seed=seed, simulation=network)
    assert not equal_bits(*run.replicas)
    assert equal_bits(*run.replicas[1:])  # it is worker 0 that differs


class PlainFloats(Broadcast):
    """Negative control: replicas add updates as they come, without a ledger."""

    async def worker(self, me):
        while me.training:
            for message in me.arrived("update"):
                me.params += message.array
            before = me.params.copy()
            me.optimizer_step(await me.gradient())
            me.send_all(me.peers, "update", me.params - before, StepCount())

    async def finish(self, me):
        me.leave(peers=True)
        async for message in me.messages():
            if message.tag == "update":
                me.params += message.array


class ReceiverSteps(Broadcast):
    """Negative control: gradients travel, and each receiver puts them through an optimizer of its own."""

    async def worker(self, me):
        while me.training:
            for message in me.arrived("gradient"):
                me.optimizer_step(message.array)
            gradient = (await me.gradient()).copy()
            me.optimizer_step(gradient)
            me.send_all(me.peers, "gradient", gradient)

    async def finish(self, me):
        me.leave(peers=True)
        async for message in me.messages():
            if message.tag == "gradient":
                me.optimizer_step(message.array)


class ReceiverScales(PlainFloats):
    """Negative control: the receiver scales by a learning rate that falls with its own clock."""

    async def worker(self, me):
        while me.training:
            for message in me.arrived("update"):
                me.params += message.array / me.params.dtype.type(1 + me.step)
            before = me.params.copy()
            me.optimizer_step(await me.gradient())
            me.send_all(me.peers, "update", me.params - before, StepCount())


@pytest.mark.negative_control("strategy:broadcast")
@pytest.mark.parametrize(
    ("broken", "optimizer", "apart"),
    [
        (PlainFloats(), "sgd(lr=0.1)", 0.0),
        (ReceiverSteps(), "sgd(lr=0.05, momentum=0.9)", 1e-3),
        (ReceiverSteps(), "adam(lr=0.02)", 1e-3),
        (ReceiverScales(), "sgd(lr=0.1)", 1e-3),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Broadcast) else str(value),
)
def test_another_rule_breaks_statement_1(broken, optimizer, apart):
    for seed in range(3):
        run = run_strategy(broken, 4, 12, job=small_job(optimizer), seed=seed)
        assert not equal_bits(*run.replicas)
        assert np.abs(run.replicas - run.replicas[0]).max() > apart
