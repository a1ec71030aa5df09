"""Elastic averaging against plain numpy: elastic symmetry, and when it is stable."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from flockstep.messages import MASTER
from flockstep.simulation.compute import ComputeModel
from flockstep.strategies.elastic_averaging import ElasticAveraging, largest_stable
from flockstep.testing.strategies import COMPUTE, GradientSource, bowl_job, equal_bits, run_strategy, small_job
from flockstep_lab.claims.a05_easgd_stability import one_round

STILL = bowl_job("sgd(lr=0)")


def oracle(n, period, alpha, steps, optimizer="sgd(lr=0.1)", order="survey"):
    """Replicas and center where messages take no time: exchanges happen one after the other."""
    source = GradientSource(n, small_job(optimizer))
    w, center, g = [source.start() for _ in range(n)], source.start(), [source.start() for _ in range(n)]
    steppers = [source.stepper(replica) for replica in w]
    durations = [ComputeModel.parse(COMPUTE).stream(0, rank) for rank in range(n)]
    due, late = [(0.0, rank, 0) for rank in range(n)], {}
    while due:
        t, rank, step = heapq.heappop(due)
        if step > 0:
            steppers[rank].step(w[rank], g[rank])
            w[rank] -= late.pop(rank, 0)
        if step < steps:
            if step % period == 0:
                delta = np.float32(alpha) * (w[rank] - center)
                center += delta
                if order == "survey":
                    w[rank] -= delta
                else:
                    late[rank] = delta
            g[rank] = source.gradient(rank, w[rank])
            heapq.heappush(due, (t + next(durations[rank]), rank, step + 1))
    return w, center


@pytest.mark.parametrize(("n", "period", "alpha"), [(1, 1, 0.5), (1, 4, 0.1), (3, 1, 0.3), (4, 3, 0.225)])
@pytest.mark.parametrize("optimizer", ["sgd(lr=0.1)", "sgd(lr=0.1, momentum=0.9, nesterov=True)"])
@pytest.mark.parametrize("order", ["survey", "paper"])
@pytest.mark.oracle("strategy:easgd")
def test_equals_the_oracle(n, period, alpha, optimizer, order):
    job = small_job(optimizer)
    run = run_strategy(f"easgd({period}, {alpha}, {order})", n, 15, job=job, network="ideal")
    replicas, center = oracle(n, period, alpha, 15, optimizer, order)
    assert equal_bits(run.result, run.server, center)
    assert all(equal_bits(one, other) for one, other in zip(run.replicas, replicas, strict=True))


@pytest.mark.parametrize(("steps", "period"), [(20, 1), (20, 5), (21, 5), (3, 10)])
def test_each_exchange_moves_two_models(steps, period):
    run = run_strategy(f"easgd({period})", 3, steps)
    exchanges = -(-steps // period)
    for rank in range(3):
        totals = run.totals[rank]
        assert (totals.sent_bytes, totals.received_bytes) == (exchanges * 18 * 4, exchanges * 18 * 4)
        assert (totals.messages_sent, totals.messages_received) == (2 * exchanges + 1, exchanges)
    assert run.totals[MASTER].sent_bytes == run.totals[MASTER].received_bytes == 3 * exchanges * 18 * 4
    assert run.nodes[MASTER].version == 3 * exchanges


def kept(strategy, start, job=STILL, **options):
    """What the sum of all replicas and the center (0 at first) has become, less what it was, in float64."""
    run = run_strategy(strategy, len(start), 12, job=job, replicas=start, **options)
    assert not equal_bits(run.replicas, start)
    return run.replicas.sum(0, dtype=np.float64) + run.server - start.sum(0, dtype=np.float64)


@pytest.mark.parametrize("network", ["ideal", "link(1000, 0.02)"])
@pytest.mark.parametrize("n", [1, 3, 5])
@pytest.mark.parametrize("order", ["survey", "paper"])
def test_exchanges_conserve_the_sum_of_replicas_and_center(n, network, order):
    start = np.random.default_rng(0).normal(size=(n, 8))
    assert np.abs(kept(f"easgd(1, 0.3, {order})", start, network=network)).max() < 1e-14
    single = bowl_job("sgd(lr=0)", dtype="float32")
    assert np.abs(kept(f"easgd(1, 0.3, {order})", start.astype(np.float32), single, network=network)).max() < 1e-5
    # Halves of whole numbers are exact until the 53 bits are used up.
    whole = np.random.default_rng(0).integers(-8, 8, (n, 8)) * 1.0
    assert not kept(f"easgd(4, 0.5, {order})", whole, network=network).any()


class OneSided(ElasticAveraging):
    """Negative control: the workers are drawn to the center and do not draw it."""

    async def master(self, me):
        async for message in me.messages():
            if message.tag == "pull":
                me.reply(message, me.params)


class Unequal(ElasticAveraging):
    """Negative control: the center moves by beta = alpha / 2."""

    async def master(self, me):
        async for message in me.messages():
            match message.tag:
                case "pull":
                    me.reply(message, me.params)
                case "push":
                    me.params += message.array / 2


@pytest.mark.negative_control("strategy:easgd")
@pytest.mark.parametrize("broken", [OneSided(1, 0.3), Unequal(1, 0.3)], ids=lambda s: type(s).__name__)
def test_the_sum_notices_a_broken_symmetry(broken):
    start = np.random.default_rng(0).normal(size=(3, 8))
    assert np.abs(kept(broken, start)).max() > 0.1


def turn(n, eta, alpha, gradient_first):
    """What one round-robin of n workers does to (w_0, …, w_n-1, center) on the quadratic w² / 2."""
    whole = np.eye(n + 1)
    for rank in range(n):
        exchange, step = np.eye(n + 1), np.eye(n + 1)
        exchange[rank, [rank, n]] = 1 - alpha, alpha
        exchange[n, [rank, n]] = alpha, 1 - alpha
        if gradient_first:
            exchange[rank, rank] -= eta
        else:
            step[rank, rank] = 1 - eta
        whole = step @ exchange @ whole
    return whole


def radius(*args):
    return np.abs(np.linalg.eigvals(turn(*args))).max()


@pytest.mark.parametrize(("eta", "bound"), [(0.1, 0.974), (0.5, 0.857), (1, 0.667), (1.5, 0.4), (1.9, 0.095)])
@pytest.mark.parametrize("n", [1, 3, 8])
def test_the_published_bound_is_that_of_the_papers_order(eta, bound, n):
    limit = (4 - 2 * eta) / (4 - eta)
    assert limit == pytest.approx(bound, abs=1e-3)
    assert largest_stable(eta) == limit
    assert radius(n, eta, 0.99 * limit, True) < 1 < radius(n, eta, 1.01 * limit, True)


def test_the_claim_measures_the_matrix_of_a_round():
    for n, eta, alpha in [(1, 0.1, 0.3), (3, 0.5, 0.9), (3, 1.9, 0.1)]:
        assert np.allclose(one_round(n, eta, alpha), turn(n, eta, alpha, True), rtol=0, atol=1e-14)


def test_no_alpha_is_stable_beyond_two():
    assert largest_stable(2) == largest_stable(3) == largest_stable(5) == 0


@pytest.mark.parametrize("network", ["ideal", "link(1000, 0.02)"])
@pytest.mark.parametrize("order", ["survey", "paper"])
def test_with_another_rate_at_the_center_the_weighted_sum_is_conserved(network, order):
    """w_i ← w_i - alpha (w_i - center), center ← center + beta (w_i - center): beta w_i + alpha center stays."""
    start = np.random.default_rng(0).normal(size=(3, 8))
    text = f"easgd(1, 0.4, {order}, beta=0.1)"
    run = run_strategy(text, 3, 12, job=STILL, replicas=start, network=network)
    left = 0.1 * run.replicas.sum(0) + 0.4 * run.server - 0.1 * start.sum(0)
    assert np.abs(left).max() < 1e-14
    assert np.abs(kept(text, start, network=network)).max() > 0.01


def test_the_center_moves_by_beta():
    start = np.random.default_rng(0).normal(size=(1, 8))
    run = run_strategy("easgd(1, 0.4, beta=0.1)", 1, 1, job=STILL, replicas=start)
    assert run.server == pytest.approx(0.1 * start[0], rel=1e-12)
    assert run.replicas[0] == pytest.approx(0.6 * start[0], rel=1e-12)
