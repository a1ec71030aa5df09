"""Parameter server against plain numpy: one oracle for every consistency, sharding, bytes and staleness."""

from __future__ import annotations

import heapq
import math
from collections import Counter

import numpy as np
import pytest

from flockstep.messages import server
from flockstep.records.events import StepEvent, UpdateEvent
from flockstep.simulation.compute import ComputeModel
from flockstep.strategies.consistency import Asynchronous, BulkSynchronous
from flockstep.strategies.parameter_server import ParameterServer
from flockstep.testing.strategies import COMPUTE, GradientSource, Sent, Watched, equal_bits, run_strategy, small_job

STEPS = 15
ALL = ["bsp", "ssp(0)", "ssp(1)", "ssp(3)", "asynchronous"]


def oracle(n, s, compute=COMPUTE, optimizer="sgd(lr=0.1)", steps=STEPS):
    """The server and what each worker read last, (1 + n, K): stale synchronous parallel with bound s where messages
    take no time, from Ho et al.'s conditions. There is a read after every push, also after the last.

    Each gradient counts as 1/n of a step; without a bound, where each is applied alone, as a whole one. With sgd, which
    is linear, the gradient or the learning rate is scaled; Adam takes the share itself (unit/test_optimizer_shares.py).
    """
    source = GradientSource(n, small_job(optimizer))
    w = source.start()
    stepper = source.stepper(w)
    rate, full = stepper.lr, n if s < math.inf else 1
    durations = [ComputeModel.parse(compute).stream(0, rank) for rank in range(n)]
    read, clock, pending, idle = [w.copy()] * n, [0] * n, [], set(range(n))
    due, now = [], 0.0
    while idle or due:
        for rank in [r for r in sorted(idle) if clock[r] - s <= min(clock)]:
            idle.remove(rank)
            read[rank] = w.copy()
            if clock[rank] < steps:
                heapq.heappush(due, (now + next(durations[rank]), rank))
        if not due:
            break
        now, rank = heapq.heappop(due)
        pending.append((clock[rank], rank, source.gradient(rank, read[rank])))
        clock[rank] += 1
        idle.add(rank)
        for t in sorted({t for t, _, _ in pending if t <= min(clock) + s - 1}):
            group = [g for _, _, g in sorted((p for p in pending if p[0] == t), key=lambda p: p[1])]
            mean, share = sum(group[1:], group[0]) / w.dtype.type(len(group)), len(group) / full
            if "adam" in optimizer:
                source.engine.optimizer.step(w, mean, stepper.state, rate, share)
            elif "momentum" in optimizer:
                stepper.step(w, mean * w.dtype.type(share))
            else:
                stepper.lr = rate * share
                stepper.step(w, mean)
            pending = [p for p in pending if p[0] != t]
    return np.stack([w, *read])


def ends(run):
    """What the servers hold at the end, and each worker: (1 + n, K)."""
    return np.stack([run.server, *run.replicas])


def bound(consistency):
    return {"bsp": 0, "asynchronous": math.inf}.get(consistency) if "(" not in consistency else int(consistency[4:-1])


@pytest.mark.oracle("strategy:ps", "server_update:plain")
@pytest.mark.parametrize("consistency", ALL)
@pytest.mark.parametrize("optimizer", ["sgd(lr=0.1)", "sgd(lr=0.1, momentum=0.9)", "adam(lr=0.02)"])
def test_equals_the_oracle(consistency, optimizer):
    for n in (2, 4):
        run = run_strategy(f"ps({consistency})", n, STEPS, job=small_job(optimizer), network="ideal")
        expected = oracle(n, bound(consistency), optimizer=optimizer)
        assert equal_bits(ends(run), expected)
        assert equal_bits(run.result, expected[0])


@pytest.mark.parametrize("consistency", ALL)
def test_equals_the_oracle_with_a_straggler_on_shards(consistency):
    compute = "speeds(exponential(0.05), (1, 1, 1, 6))"
    run = run_strategy(f"ps({consistency}, shards=3)", 4, STEPS, compute=compute, network="ideal")
    assert equal_bits(ends(run), oracle(4, bound(consistency), compute))


@pytest.mark.parametrize("shards", [2, 3, 7, 18])
@pytest.mark.parametrize("optimizer", ["sgd(lr=0.1, momentum=0.9, weight_decay=0.01)", "adam(lr=0.02)"])
def test_sharding_changes_no_bit_of_bulk_synchronous(shards, optimizer):
    job = small_job(optimizer)
    whole = run_strategy("ps(bsp)", 4, STEPS, job=job)
    cut = run_strategy(f"ps(bsp, shards={shards})", 4, STEPS, job=job)
    assert equal_bits(whole.result, cut.result)
    assert equal_bits(*whole.replicas, *cut.replicas)


@pytest.mark.parametrize("consistency", ALL)
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("n", [1, 4])
def test_a_step_is_one_push_and_one_reply(consistency, shards, n):
    run = run_strategy(f"ps({consistency}, shards={shards})", n, STEPS)
    sizes = {1: [18], 3: [6, 6, 6]}[shards]
    for rank in range(n):
        totals = run.totals[rank]
        assert (totals.sent_bytes, totals.received_bytes) == (STEPS * 18 * 4, STEPS * 18 * 4)
        assert totals.messages_sent == STEPS * shards + shards  # a leave message to each
        assert totals.messages_received == STEPS * shards
    for i, size in enumerate(sizes):
        totals = run.totals[server(i)]
        assert (totals.sent_bytes, totals.received_bytes) == (n * STEPS * size * 4, n * STEPS * size * 4)
        assert (totals.messages_sent, totals.messages_received) == (n * STEPS, n * STEPS + n)
    assert [run.params[server(i)].size for i in range(shards)] == sizes


@pytest.mark.parametrize("feedback", ["none", "residual"])
def test_half_precision_pushes_half_the_bytes_of_what_the_rule_says(feedback):
    source = GradientSource()
    w, error = source.start(), np.zeros(18, np.float32)
    for _ in range(STEPS):
        wanted = source.gradient(0, w) + error
        sent = wanted.astype(np.float16).astype(np.float32)
        error = wanted - sent if feedback == "residual" else error
        w -= np.float32(0.1) * sent
    run = run_strategy(f"ps(codec=half, feedback={feedback})", 1, STEPS)
    assert equal_bits(run.result, w)
    assert run.totals[0].sent_bytes == STEPS * 18 * 2
    assert run.totals[0].received_bytes == STEPS * 18 * 4


class Decaying(Watched):
    """Every worker has learning rates of its own, which change with its steps."""

    def note(self, event):
        super().note(event)
        if isinstance(event, StepEvent):
            self._steppers[event.rank].lr = decayed(event.rank, event.step)


def decayed(rank, step):
    return 0.1 / (1 + rank) / step


def replay(run, lr):
    """An asynchronous run again, from the order in which updates and replies happened; counts what it compared."""
    n = run.simulation.plan.cluster.workers
    source, applied, compared = GradientSource(n), [0] * n, 0
    w = source.start()
    read = [w.copy() for _ in range(n)]
    for entry in run.simulation.log:
        if isinstance(entry, UpdateEvent):
            rank = entry.source
            applied[rank] += 1
            w -= np.float32(lr(rank, applied[rank])) * source.gradient(rank, read[rank])
        elif isinstance(entry, Sent) and entry.message.reply_to:
            read[entry.to] = w.copy()
            assert equal_bits(entry.message.array, w)
            compared += 1
    assert equal_bits(ends(run), np.stack([w, *read]))
    return compared


@pytest.mark.parametrize("network", ["ideal", "1gbit", "link(1000, 0.02)"])
@pytest.mark.parametrize("simulation", [Watched, Decaying])
def test_an_asynchronous_run_is_its_updates_in_their_order(network, simulation):
    """On any network a gradient is of what its worker was answered last, and takes the learning rate of its push."""
    run = run_strategy("asgd", 4, STEPS, network=network, simulation=simulation)
    assert replay(run, decayed if simulation is Decaying else lambda rank, step: 0.1) == 4 * STEPS


def test_the_replay_notices_another_learning_rate():
    run = run_strategy("asgd", 4, STEPS, simulation=Decaying)
    with pytest.raises(AssertionError, match="equal_bits"):
        replay(run, lambda rank, step: 0.1)


@pytest.mark.parametrize("consistency", ["bsp", "ssp(0)"])
def test_an_average_takes_the_mean_of_the_learning_rates(consistency):
    source = GradientSource(3)
    w = source.start()
    for step in range(1, STEPS + 1):
        g = [source.gradient(rank, w) for rank in range(3)]
        rate = math.fsum(decayed(rank, step) for rank in range(3)) / 3
        w -= np.float32(rate) * ((g[0] + g[1] + g[2]) / np.float32(3))
    run = run_strategy(f"ps({consistency})", 3, STEPS, simulation=Decaying)
    assert equal_bits(w, run.server, *run.replicas)


def in_flight(run):
    """At each update of an asynchronous server: its staleness, and the other gradients read and not yet applied.

    Everyone begins with the parameters of version 0; what a worker reads after its last push is for no gradient.
    """
    workers = range(run.simulation.plan.cluster.workers)
    reading, answered, counts = set(workers), Counter(), []
    for entry in run.simulation.log:
        if isinstance(entry, Sent) and entry.message.reply_to:
            answered[entry.to] += 1
            if answered[entry.to] < run.simulation.plan.steps:
                reading.add(entry.to)
        elif isinstance(entry, UpdateEvent):
            reading.remove(entry.source)
            counts.append((entry.staleness, len(reading)))
    assert not reading
    return counts


@pytest.mark.parametrize("network", ["ideal", "1gbit", "link(1000, 0.02)"])
@pytest.mark.parametrize("compute", ["exponential(0.05)", "pareto(0.05, 1.5)", "speeds(constant(0.05), (1, 1.7, 4))"])
def test_staleness_adds_up_to_the_gradients_in_flight(network, compute):
    """Each update makes every gradient in flight one version staler: two ways to count the same pairs."""
    for n in (1, 3, 8):
        counts = in_flight(run_strategy("asgd", n, STEPS, compute=compute, network=network))
        assert len(counts) == n * STEPS
        assert sum(staleness for staleness, _ in counts) == sum(others for _, others in counts)


class OrderOfArrival(BulkSynchronous):
    """Negative control: averages in the order in which gradients came."""

    def released(self, pending, view):
        group = [push for push in pending if push.timestamp < view.slowest]
        return [group] if group else []


class OneTooFew(Asynchronous):
    """Negative control: holds each gradient back until the next comes."""

    def released(self, pending, view):
        return [[push] for push in pending[:-1]]


class StaleAnswers(ParameterServer):
    """Negative control: answers with what it was asked for the first time."""

    async def master(self, me):
        first = me.params.copy()
        reply_all = me.reply_all
        me.reply_all = lambda requests, array, note: reply_all(requests, first, note)
        await super().master(me)


@pytest.mark.negative_control("strategy:ps", "server_update:plain")
@pytest.mark.parametrize(
    ("broken", "s"),
    [
        (ParameterServer(OneTooFew()), math.inf),
        (StaleAnswers(Asynchronous()), math.inf),
        (StaleAnswers(BulkSynchronous()), 0),
    ],
    ids=["holds back", "stale", "stale bsp"],
)
def test_the_oracle_notices_another_rule(broken, s):
    assert not equal_bits(run_strategy(broken, 4, STEPS, network="ideal").server, oracle(4, s)[0])


def test_the_order_of_rank_is_what_makes_time_irrelevant():
    def results(strategy):
        computes = [f"speeds(exponential(0.05), {speeds})" for speeds in ((1, 1, 1, 9), (9, 1, 1, 1), (1, 9, 5, 1))]
        return {run_strategy(strategy, 4, STEPS, compute=compute).result.tobytes() for compute in computes}

    assert len(results("bsp")) == 1
    assert len(results(ParameterServer(OrderOfArrival()))) == 3
