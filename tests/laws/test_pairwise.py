"""Pairwise averaging against plain numpy: atomic averages, no waiting in a circle, and nobody waits for the slow."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flockstep.records.events import StepEvent, UpdateEvent
from flockstep.simulation.compute import ComputeModel
from flockstep.strategies import pairwise
from flockstep.strategies.pairwise import PairwiseAveraging
from flockstep.testing.strategies import COMPUTE, GradientSource, bowl_job, equal_bits, run_strategy, small_job
from flockstep.topologies.base import Topology
from flockstep.topologies.requirements import sides

STILL = bowl_job("sgd(lr=0)")
BIPARTITE = ["ring", "star", "tree", "torus", "graph('0-1 0-3 2-1 2-3')"]


def oracle(topology, n, steps, seed=0, after=False):
    """A gradient at the model as it is, an average with a random neighbor, a step when the gradient is done."""
    source, topology = GradientSource(n, small_job(), seed), Topology.parse(topology)
    random = [np.random.default_rng(np.random.SeedSequence((seed, 0x5747, rank + (1 << 31)))) for rank in range(n)]
    durations = [ComputeModel.parse(COMPUTE).stream(seed, rank) for rank in range(n)]
    active, _ = sides(topology, n, "oracle")
    w, g, due = [source.start() for _ in range(n)], [None] * n, []
    begun = [0] * n

    def begin(t, rank):
        g[rank] = source.gradient(rank, w[rank]).copy()
        others = topology.neighbors(n, rank)
        if rank in active and others:
            j = others[int(random[rank].integers(len(others)))]
            w[rank][:] = w[j][:] = (w[rank] + w[j]) * np.float32(0.5)
        begun[rank] += 1
        heapq.heappush(due, (t + next(durations[rank]), rank))

    for rank in range(n):
        begin(0.0, rank)
    while due:
        t, rank = heapq.heappop(due)
        w[rank] -= np.float32(0.1) * g[rank]
        if begun[rank] < steps:
            begin(t, rank)
    return w


@pytest.mark.oracle("strategy:adpsgd")
@pytest.mark.parametrize(
    ("topology", "n"), [("ring", 2), ("ring", 4), ("ring", 6), ("star", 5), ("tree", 7), ("torus", 4)]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_equals_the_oracle_where_messages_take_no_time(topology, n, seed):
    run = run_strategy(f"adpsgd({topology})", n, 12, network="ideal", seed=seed)
    pairs = zip(run.replicas, oracle(topology, n, 12, seed), strict=True)
    assert all(equal_bits(*pair) for pair in pairs)


class AtTheAverage(PairwiseAveraging):
    """Negative control: waits for the average first, and takes the gradient there."""

    async def worker(self, me):
        active, neighbors = self._place(me)
        answers = None if active else me.background(pairwise.PAIRS, pairwise.answer(me))
        while me.training:
            if active:
                j = neighbors[int(me.random.integers(len(neighbors)))]
                await me.finished(me.background(pairwise.PAIRS, pairwise.average(me, j)))
            me.optimizer_step(await me.gradient())
        if answers is not None:
            await pairwise.serve_out(me, neighbors)
            me.background(pairwise.PAIRS, pairwise.hush(me))
            await me.finished(answers)


@pytest.mark.negative_control("strategy:adpsgd")
def test_the_oracle_notices_a_gradient_at_another_model():
    run = run_strategy(AtTheAverage(), 4, 12, network="ideal")
    pairs = zip(run.replicas, oracle("ring", 4, 12), strict=True)
    assert not any(np.allclose(*pair, atol=1e-3) for pair in pairs)


def pair_matrix(n, i, j):
    """W_k of one average: half and half for i and j, nothing for the others."""
    weights = np.eye(n)
    weights[[i, i, j, j], [i, j, i, j]] = 0.5
    return weights


@pytest.mark.oracle("strategy:adpsgd")
@pytest.mark.parametrize("topology", BIPARTITE)
@pytest.mark.parametrize("network", ["ideal", "link(500, 0.3)"])
def test_without_gradients_a_run_is_a_product_of_symmetric_doubly_stochastic_matrices(topology, network):
    """One after the other in the order in which the passive side answered, exactly: no average overlaps another."""
    job = bowl_job("sgd(lr=0)", dimension=4)
    run = run_strategy(f"adpsgd({topology})", 4, 10, job=job, network=network, replicas=np.eye(4))
    active, _ = sides(Topology.parse(topology), 4, "test")
    answered = [(event.source, event.node) for event in run.of(UpdateEvent) if event.node not in active]
    product = np.eye(4)
    for i, j in answered:
        weights = pair_matrix(4, i, j)
        assert np.array_equal(weights, weights.T)
        assert (weights.sum(0) == 1).all()
        product = weights @ product
    assert len(answered) == 10 * len(active)
    assert np.array_equal(run.replicas, product)
    assert (run.replicas.sum(0) == 1).all()
    assert (run.replicas.sum(1) == 1).all()


@given(
    topology=st.sampled_from(BIPARTITE),
    seed=st.integers(0, 10**6),
    compute=st.sampled_from(["constant(0.1)", "constant(0)", "pareto(0.05, 1.1)", "speeds(exponential(0.1), (1, 50))"]),
    network=st.sampled_from(["ideal", "link(500, 0.3)", "link(1e6, 2)", "two_tier(2, 1e4, 0, 100, 1)"]),
)
@settings(max_examples=40)
def test_whatever_the_delays_it_ends_and_keeps_the_sum(topology, seed, compute, network):
    start = np.random.default_rng(seed).integers(-8, 8, (4, 8)) * 1.0
    run = run_strategy(
        f"adpsgd({topology})", 4, 8, job=STILL, seed=seed, compute=compute, network=network, replicas=start
    )
    assert len(run.of(StepEvent)) == 4 * 8
    assert np.array_equal(run.replicas.sum(0), start.sum(0))  # sums of few binary fractions are exact


class OneHalf(PairwiseAveraging):
    """Negative control: who asks takes the average, who is asked stays where it is."""

    async def worker(self, me):
        async def answer():
            while (message := await me.receive("model")).source != me.rank:
                me.reply(message, (me.params + message.payload) / 2)
                me.record_update(message.source)

        active, neighbors = self._place(me)
        if active:
            await super().worker(me)
            return
        answers = me.background(pairwise.PAIRS, answer())
        while me.training:
            me.optimizer_step(await me.gradient())
        await pairwise.serve_out(me, neighbors)
        me.background(pairwise.PAIRS, pairwise.hush(me))
        await me.finished(answers)


@pytest.mark.negative_control("strategy:adpsgd")
def test_the_sum_notices_half_an_average():
    start = np.random.default_rng(0).integers(-8, 8, (4, 8)) * 1.0
    run = run_strategy(OneHalf(), 4, 8, job=STILL, replicas=start)
    assert np.abs(run.replicas.sum(0) - start.sum(0)).max() > 0.1


@pytest.mark.parametrize(("topology", "asks"), [("ring", 3), ("star", 5), ("tree", 4)])
def test_an_average_is_one_model_out_and_one_back(topology, asks):
    run = run_strategy(f"adpsgd({topology})", 6, 12)
    payload = 18 * 4
    active, passive = sides(Topology.parse(topology), 6, "test")
    assert len(active) == asks
    assert [run.totals[rank].sent_bytes for rank in active] == [12 * payload] * asks
    assert [run.totals[rank].received_bytes for rank in active] == [12 * payload] * asks
    assert sum(run.totals[rank].sent_bytes for rank in passive) == 12 * payload * asks


@pytest.mark.parametrize("dead", [0, 1])
def test_whichever_side_dies_the_others_go_on(dead):
    run = run_strategy("adpsgd", 6, 40, faults=[f"dies({dead}, 0.4, noticed=0.3)"])
    taken = [sum(event.rank == rank for event in run.of(StepEvent)) for rank in range(6)]
    assert taken[dead] < 40
    assert taken[:dead] + taken[dead + 1 :] == [40] * 5
