"""Downpour SGD against plain numpy: periods, local steps, what is pushed and what the servers hold."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest

from flockstep.codecs.identity import Identity
from flockstep.errors import CompositionError
from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.numpy import Model
from flockstep.messages import MASTER, server
from flockstep.records.events import StepEvent, UpdateEvent
from flockstep.simulation.compute import ComputeModel
from flockstep.strategies.base import Strategy
from flockstep.strategies.downpour import Downpour
from flockstep.strategies.filters.base import Filter
from flockstep.strategies.filters.packet import Inbox, unpack
from flockstep.testing.strategies import (
    COMPUTE,
    GradientSource,
    check_strategy,
    equal_bits,
    run_strategy,
    small_job,
)
from support.matrix import few

STEPS = 20
F = np.float32
ALL = [(1, 1), (1, 5), (5, 1), (5, 5), (2, 5), (4, 10)]


def oracle(n, n_push, n_fetch, optimizer="sgd(lr=0.1)", steps=STEPS, overlap=True):
    """The server and the replicas, (1 + n, K), where messages take no time.

    Dean et al. 2012, algorithm 7.1: a fetch is begun and the gradient computed before what it brings is there, which
    then takes the replica's place; the gradient's step is taken from there. Without overlap it is there at once.
    """
    source = GradientSource(n, small_job(optimizer))
    w = source.start()
    master, count = source.stepper(w), [0] * n

    def push(rank):
        """The sum of m gradients is m steps' worth along their mean."""
        source.engine.optimizer.step(w, sums[rank] / F(count[rank]), master.state, master.lr, count[rank])
        sums[rank][:], count[rank] = 0, 0

    durations = [ComputeModel.parse(COMPUTE).stream(0, rank) for rank in range(n)]
    replicas, sums, step = [w.copy() for _ in range(n)], [0 * w for _ in range(n)], [0] * n
    steppers, fetched = [source.stepper(replica) for replica in replicas], [None] * n
    due = [(next(durations[rank]), rank) for rank in range(n)]
    heapq.heapify(due)
    while due:
        now, rank = heapq.heappop(due)
        gradient = source.gradient(rank, replicas[rank])
        sums[rank] += gradient
        count[rank] += 1
        if fetched[rank] is not None:
            replicas[rank][:], fetched[rank] = fetched[rank], None
        steppers[rank].step(replicas[rank], gradient)
        step[rank] += 1
        last = step[rank] == steps
        if step[rank] % n_push == 0:
            push(rank)
        if step[rank] % n_fetch == 0:
            fetched[rank] = w.copy()
        if fetched[rank] is not None and not overlap:
            replicas[rank][:], fetched[rank] = fetched[rank], None
        if last and step[rank] % n_push:
            push(rank)
        if not last:
            heapq.heappush(due, (now + next(durations[rank]), rank))
    return np.stack([w, *replicas])


def ends(run):
    return np.stack([run.server, *run.replicas])


@pytest.mark.oracle("strategy:downpour")
@pytest.mark.parametrize("periods", [*ALL, (3, 7), (30, 4), (7, 30)])
@pytest.mark.parametrize("optimizer", ["sgd(lr=0.1)", "sgd(lr=0.1, momentum=0.9)", "adagrad(lr=0.05)"])
@pytest.mark.parametrize("overlap", [True, False])
def test_equals_the_oracle(periods, optimizer, overlap):
    for n in (1, 3):
        text = "downpour({}, {}, overlap={})".format(*periods, overlap)
        run = run_strategy(text, n, STEPS, job=small_job(optimizer), network="ideal")
        assert equal_bits(ends(run), oracle(n, *periods, optimizer=optimizer, overlap=overlap))


class StandsStill(Downpour):
    """Negative control: no local steps between fetches."""

    async def worker(self, me):
        me.optimizer_step = lambda gradient: None
        await super().worker(me)


@pytest.mark.negative_control("strategy:downpour")
def test_the_oracle_notices_missing_local_steps():
    run = run_strategy(StandsStill(5, 5), 3, STEPS, network="ideal")
    assert not np.allclose(ends(run), oracle(3, 5, 5), atol=1e-3)
    run = run_strategy(StandsStill(5, 1, overlap=False), 3, STEPS, network="ideal")
    assert equal_bits(ends(run), oracle(3, 5, 1, overlap=False))  # what is fetched at every step takes their place


@pytest.mark.negative_control("strategy:downpour")
def test_the_oracle_notices_a_fetch_that_is_waited_for():
    run = run_strategy(Downpour(overlap=False), 3, STEPS, network="ideal")
    assert not np.allclose(ends(run), oracle(3, 1, 1), atol=1e-4)


@pytest.mark.parametrize(("overlap", "step"), [(True, 1.0), (False, 1.6)])
@pytest.mark.parametrize("n_push", [1, 4])
def test_a_fetch_travels_while_a_gradient_is_computed(overlap, step, n_push):
    """Gradients of 1 s, 0.3 s each way: the paper's workers do not wait."""
    run = run_strategy(
        f"downpour({n_push}, 1, overlap={overlap})", 3, 20, compute="constant(1)", network="link(1e12, 0.3)"
    )
    ends = sorted(event.seconds for event in run.of(StepEvent) if event.rank == 0)
    assert np.diff(ends).mean() == pytest.approx(step)


def test_a_fetch_replaces_the_replica_when_it_is_there():
    """Two gradients are computed while it travels; the steps taken meanwhile are at the server, not in what it sent."""
    run = run_strategy("downpour(1, 3)", 1, 5, job=slope_job(), compute="constant(1)", network="link(1e12, 0.6)")
    source = GradientSource(1, slope_job())
    gradients = [source.gradient(0, source.start()) for _ in range(5)]
    assert equal_bits(run.server, np.arange(6.0) - 0.25 * np.sum(gradients, axis=0))
    # fetched after the third step, there before the fifth: without the fourth
    expected = np.arange(6.0) - 0.25 * (np.sum(gradients[:3], axis=0) + gradients[4])
    assert equal_bits(run.replicas[0], expected)


@pytest.mark.parametrize("network", ["ideal", "1gbit", "link(1000, 0.02)"])
@pytest.mark.parametrize("shards", [1, 3])
def test_pushing_and_fetching_at_every_step_is_asgd(network, shards):
    """Times, bytes and stalenesses are equal too."""
    one = run_strategy(f"downpour(1, 1, shards={shards}, overlap=False)", 4, STEPS, network=network)
    other = run_strategy(f"ps(asynchronous, shards={shards})", 4, STEPS, network=network)
    assert equal_bits(ends(one), ends(other))
    assert one.events == other.events


@pytest.mark.parametrize(("n_push", "n_fetch"), few(ALL, ALL[-1]))
def test_every_promise_of_a_strategy(n_push, n_fetch):
    check_strategy(Downpour(n_push, n_fetch), steps=40, alone_is_plain=n_push == 1)
    check_strategy(Downpour(n_push, n_fetch, shards=3), (2,))


@pytest.mark.parametrize(("shards", "periods"), [(2, (1, 1)), (3, (2, 5)), (18, (5, 5))])
@pytest.mark.parametrize("optimizer", ["sgd(lr=0.1)", "adagrad(lr=0.05)"])
def test_sharding_changes_no_bit_where_messages_are_atomic(shards, periods, optimizer):
    job = small_job(optimizer)
    whole, cut = (run_strategy(Downpour(*periods, shards=k), 4, STEPS, job=job, network="ideal") for k in (1, shards))
    assert equal_bits(ends(whole), ends(cut))


# ---- conservation, in exact numbers


class Slope(Model):
    """w · x: the gradient is the mean sample, wherever w is."""

    dtype = "float64"

    @property
    def shapes(self):
        return {"w": (6,)}

    def initial(self, random):
        return {"w": np.arange(6.0)}

    def gradients(self, params, x, y, out):
        np.mean(x, axis=1, out=out["w"])
        return np.zeros(len(x))

    def outputs(self, params, x):
        return x @ params["w"]

    def loss(self, params, outputs, y):
        return float(np.mean(outputs))


def slope_job():
    """Multiples of 420/8, batches of 4, learning rate 1/4: every sum, and its mean over up to 7, is exact."""
    x = 420 * np.random.default_rng(3).integers(-99, 99, (64, 6)) / 8
    return Job(Slope, lambda: Data(x, np.zeros(64), x, np.zeros(64)), "sgd(lr=0.25)", metric=lambda o, t: 0.0, batch=4)


def pushed(run, strategy, size=6):
    """Sum of everything that was pushed to a single server."""
    total, inboxes = np.zeros(size), {}
    for sent in run.sent("push"):
        if sent.to == MASTER and sent.message.source >= 0:
            inbox = inboxes.setdefault(sent.message.source, Inbox())
            codec, payload = Identity(), sent.message.payload
            total += unpack(strategy.filters, codec, payload, size, "float64", inbox)
    return total


def slopes(n, steps):
    source = GradientSource(n, slope_job())
    return sum(source.gradient(rank, source.start()) for rank in range(n) for _ in range(steps))


@pytest.mark.parametrize("periods", [*ALL, (7, 3)])
@pytest.mark.parametrize("filters", ["()", "(significantly_modified(9),)", "(random_skip(0.5), key_caching(2))"])
def test_what_is_pushed_and_the_start_make_the_end(periods, filters):
    strategy = Strategy.parse("downpour({}, {}, filters={})".format(*periods, filters))
    run = run_strategy(strategy, 3, STEPS, job=slope_job())
    total = pushed(run, strategy)
    assert equal_bits(run.server, np.arange(6.0) - 0.25 * total)
    assert equal_bits(total, slopes(3, STEPS))


@pytest.mark.parametrize("n_push", [1, 5])
def test_a_push_of_five_gradients_decays_weights_five_times(n_push):
    """Dean et al. 2012: the server applies sum_i g_i; with weight decay each g_i is g_i + decay w."""
    job = replace(slope_job(), optimizer="sgd(lr=0.25, weight_decay=0.01)")
    w = np.arange(6.0)
    run = run_strategy(Downpour(n_push, 5), 1, 5, job=job)
    if n_push == 5:
        np.testing.assert_allclose(run.server, w - 0.25 * (slopes(1, 5) + 5 * 0.01 * w), rtol=1e-12)
    assert {update.weight for update in run.of(UpdateEvent)} == {1.0}
    assert sum(update.count for update in run.of(UpdateEvent)) == 5


@pytest.mark.parametrize("text", ["downpour", "downpour(2, 2, overlap=False)", "downpour(1, 2, overlap=False)"])
def test_what_goes_by_reads_is_refused_where_gradients_are_of_the_workers_own_steps(text):
    """DC-ASGD compensates from the parameters that were read; the gradient of these was computed somewhere else."""
    rule = "server_update=delay_compensated"
    with pytest.raises(CompositionError, match=r"needs gradients at parameters that workers have read.*use downpour"):
        Strategy.parse(f"{text[:-1]}, {rule})" if "(" in text else f"{text}({rule})")


def test_the_sum_notices_a_push_that_is_lost():
    strategy = Downpour(2, 5)
    run = run_strategy(strategy, 3, STEPS, job=slope_job(), faults=["drops(0, -1)"])
    assert not equal_bits(run.server, np.arange(6.0) - 0.25 * pushed(run, strategy))


@pytest.mark.parametrize("periods", [(1, 1), (4, 4), (2, 5)])
def test_a_dead_worker_takes_along_only_what_it_has_not_pushed(periods):
    run = run_strategy(Downpour(*periods), 3, STEPS, job=slope_job(), faults=["dies(1, 0.3)"])
    counts = Counter()
    for update in run.of(UpdateEvent):
        counts[update.source] += update.count
    assert (counts[0], counts[2]) == (STEPS, STEPS)
    assert 0 < counts[1] < STEPS
    source = GradientSource(3, slope_job())
    total = sum(source.gradient(rank, source.start()) for rank in range(3) for _ in range(counts[rank]))
    assert equal_bits(run.server, np.arange(6.0) - 0.25 * total)


# ---- what travels


@pytest.mark.parametrize("periods", ALL)
@pytest.mark.parametrize("shards", [1, 3])
def test_messages_and_bytes(periods, shards):
    n_push, n_fetch = periods
    run = run_strategy(Downpour(n_push, n_fetch, shards), 4, STEPS)
    pushes, fetches = STEPS // n_push, STEPS // n_fetch
    both = sum(step % n_push == 0 and step % n_fetch == 0 for step in range(1, STEPS + 1))
    for rank in range(4):
        totals = run.totals[rank]
        assert (totals.sent_bytes, totals.received_bytes) == (pushes * 18 * 4, fetches * 18 * 4)
        assert totals.messages_sent == (pushes + fetches - both + 1) * shards
        assert totals.messages_received == fetches * shards
    assert run.totals[server(0)].sent_bytes == 4 * fetches * (18 // shards) * 4


def test_staleness_counts_what_others_pushed_meanwhile():
    """Two workers that take turns, n_push = n_fetch = 2: one push of the other in between, none for the first.

    Where the fetch overlaps, the first gradient after it is computed on what was fetched before: two in between.
    """
    settings = {"compute": "constant(1)", "network": "link(1e12, 0.1)"}
    run = run_strategy("downpour(2, 2, overlap=False)", 2, 8, **settings)
    assert [update.staleness for update in run.of(UpdateEvent)] == [0, *[1] * 7]
    run = run_strategy("downpour(2, 2)", 2, 8, **settings)
    assert [update.staleness for update in run.of(UpdateEvent)] == [0, 1, 1, *[2] * 5]


@dataclass(frozen=True)
class Nothing(Filter):
    """A filter that withholds every entry."""

    def lets_through(self, update, params, random):
        return np.zeros(len(update), bool)


def test_the_end_flushes_what_filters_withheld():
    run = run_strategy(Downpour(filters=(Nothing(),)), 3, STEPS, job=slope_job())
    assert equal_bits(run.server, np.arange(6.0) - 0.25 * slopes(3, STEPS))
    assert {update.count for update in run.of(UpdateEvent)} == {1}
    assert set(run.deliveries().values()) == {STEPS}
