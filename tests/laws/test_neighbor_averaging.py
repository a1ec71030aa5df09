"""Neighbor averaging against plain numpy: the mean that it keeps, how fast replicas agree, and overlap."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from flockstep.errors import ConfigurationError, PeerLost
from flockstep.frameworks.base import Data
from flockstep.records.events import UpdateEvent
from flockstep.strategies.neighbor_averaging import NeighborAveraging
from flockstep.strategies.rewiring import Bridges, rewired
from flockstep.testing.strategies import GradientSource, bowl_job, equal_bits, run_strategy, small_job
from flockstep.topologies.base import Topology, spectral_gap
from flockstep.topologies.ring import RingGraph

STILL = bowl_job("sgd(lr=0)")


def oracle(topology, n, steps, optimizer="sgd(lr=0.1)"):
    """w_i ← Σ_j W_ij w_j, in order of rank, then a step with the gradient at the old w_i."""
    source = GradientSource(n, small_job(optimizer))
    weights = topology.weights(n).astype(np.float32)
    w = [source.start() for _ in range(n)]
    steppers = [source.stepper(replica) for replica in w]
    for _ in range(steps):
        g = [source.gradient(rank, w[rank]) for rank in range(n)]
        old = [replica.copy() for replica in w]
        for i in range(n):
            w[i][:] = -0.0
            for j in range(n):
                if weights[i, j]:
                    w[i] += weights[i, j] * old[j]
            steppers[i].step(w[i], g[i])
    return w


class InTurns(RingGraph):
    """The even edges of a ring and its odd ones, in turns: everyone has one neighbor at a time."""

    def schedule(self, n):
        pairs = [np.eye(n) / 2, np.eye(n) / 2]
        for i in range(n):
            j = (i + 1) % n
            pairs[i % 2][i, j] = pairs[i % 2][j, i] = 0.5
        return tuple(pairs)

    def weights(self, n):
        return np.mean(self.schedule(n), axis=0)


@pytest.mark.oracle("strategy:dpsgd")
@pytest.mark.parametrize("n", [4, 6])
def test_a_graph_that_changes_equals_the_oracle(n):
    source, w, (even, odd) = (
        GradientSource(n, bowl_job()),
        np.tile(GradientSource(n, bowl_job()).start(), (n, 1)),
        InTurns().schedule(n),
    )
    for step in range(13):
        g = np.stack([source.gradient(rank, w[rank]) for rank in range(n)])
        w = (odd if step % 2 else even) @ w - 0.1 * g
    assert np.abs(run_strategy(NeighborAveraging(InTurns()), n, 13, job=bowl_job()).replicas - w).max() < 1e-14


@pytest.mark.parametrize(
    ("topology", "what"),
    [
        ("directed_exponential", "one-way edges"),
        ("one_peer_exponential", "one-way edges"),
        ("graph('0>1:0.5 1>2:0.5 2>3:0.5 3>0:0.5')", "one-way edges"),
        ("graph('0>1:0.3 1>2:0.3 2>3:0.3 3>0:0.3 1>0:0.1 2>1:0.1 3>2:0.1 0>3:0.1')", "a weight that differs"),
    ],
)
def test_graphs_that_go_one_way_are_refused(topology, what):
    with pytest.raises(
        ConfigurationError, match=f"needs a symmetric mixing matrix, got {what}.* or the strategy sgp, which accepts"
    ):
        run_strategy(f"dpsgd({topology})", 4, 2)
    run_strategy(f"sgp({topology})", 4, 2)


def test_alone_keeps_even_the_sign_of_zero():
    below = Data(-np.ones((9, 8)), np.zeros(9), -np.ones((1, 8)), np.zeros(1))
    job = replace(bowl_job("sgd(lr=0)", start=-0.0), data=lambda: below)
    run = run_strategy("dpsgd", 1, 3, job=job)
    assert np.signbit(run.replicas).all()
    assert np.signbit(run.result).all()


@pytest.mark.oracle("strategy:dpsgd")
@pytest.mark.parametrize("topology", ["ring", "complete", "star", "torus", "exponential"])
@pytest.mark.parametrize("n", [2, 4, 6])
@pytest.mark.parametrize("optimizer", ["sgd(lr=0.1)", "sgd(lr=0.1, momentum=0.9)", "adam(lr=0.02)"])
def test_equals_the_oracle(topology, n, optimizer):
    run = run_strategy(f"dpsgd({topology})", n, 12, job=small_job(optimizer))
    expected = oracle(Topology.parse(topology), n, 12, optimizer)
    assert all(equal_bits(one, other) for one, other in zip(run.replicas, expected, strict=True))


@pytest.mark.parametrize("compute", ["constant(0)", "pareto(0.1, 1.1)", "speeds(exponential(0.1), (1, 9))"])
@pytest.mark.parametrize("network", ["ideal", "link(1000, 0.5)", "two_tier(2, 1e4, 0, 100, 1)"])
def test_time_changes_no_bit(compute, network):
    run = run_strategy("dpsgd", 5, 12, compute=compute, network=network)
    assert all(equal_bits(*pair) for pair in zip(run.replicas, oracle(RingGraph(), 5, 12), strict=True))


def test_every_model_counts_once_and_none_is_late():
    """Neighbors average models of the same step, whatever the time that each takes (Lian et al. 2017, algorithm 1)."""
    run = run_strategy("dpsgd", 4, 5, compute="speeds(base=constant(0.1), factors=(1, 2, 3, 1))")
    found = [(one.source, one.count, one.staleness) for one in run.of(UpdateEvent) if one.node == 0]
    assert sorted(found) == [(peer, 1, 0) for peer in (1, 3) for _ in range(5)]


@pytest.mark.parametrize(("topology", "degrees"), [("ring", [2] * 6), ("complete", [5] * 6), ("star", [5] + [1] * 5)])
def test_a_step_sends_one_model_to_each_neighbor(topology, degrees):
    run = run_strategy(f"dpsgd({topology})", 6, 12)
    leave_messages = 5
    assert [run.totals[rank].messages_sent for rank in range(6)] == [12 * degree + leave_messages for degree in degrees]
    assert [run.totals[rank].sent_bytes for rank in range(6)] == [12 * degree * 18 * 4 for degree in degrees]
    assert [run.totals[rank].received_bytes for rank in range(6)] == [12 * degree * 18 * 4 for degree in degrees]


@pytest.mark.parametrize(("seconds", "latency"), [(1.0, 0.4), (0.4, 1.0), (1.0, 0.0)])
def test_models_travel_while_gradients_are_computed(seconds, latency):
    options = {"steps": 10, "compute": f"constant({seconds})", "network": f"link(1e12, {latency})"}
    assert run_strategy("dpsgd", 6, **options).seconds == pytest.approx(10 * max(seconds, latency))
    one_after_the_other = run_strategy("all_reduce", 6, **options).seconds
    assert one_after_the_other == pytest.approx(10 * (seconds + 2 * 5 * latency))


class RowsOnly(RingGraph):
    """Everyone gives worker 0 twice the weight of others: rows sum to one, columns do not."""

    def weights(self, n):
        weights = super().weights(n)
        weights[:, 0] *= 2
        return weights / weights.sum(1, keepdims=True)


class ColumnsOnly(RowsOnly):
    def weights(self, n):
        return super().weights(n).T


@pytest.mark.parametrize("topology", [RowsOnly(), ColumnsOnly()], ids=lambda t: type(t).__name__)
def test_weights_that_lose_the_mean_are_refused(topology):
    with pytest.raises(
        ConfigurationError, match=r"needs a doubly stochastic mixing matrix, got .* use a topology with"
    ):
        run_strategy(NeighborAveraging(topology), 4, 2)


class MixesLast(NeighborAveraging):
    """Negative control: mixes models that have stepped already."""

    async def worker(self, me):
        weights = self.topology.weights(me.workers)[me.rank].astype(me.params.dtype)
        while me.training:
            me.optimizer_step(await me.gradient())
            me.send_all([j for j in me.peers if weights[j]], "model", me.params)
            me.params *= weights[me.rank]
            for j in me.peers:
                if weights[j]:
                    me.params += weights[j] * (await me.receive("model", j)).array


@pytest.mark.negative_control("strategy:dpsgd")
def test_the_oracle_notices_another_order():
    run = run_strategy(MixesLast(), 4, 12)
    expected = oracle(RingGraph(), 4, 12)
    assert not any(np.allclose(*pair, atol=1e-3) for pair in zip(run.replicas, expected, strict=True))


@pytest.mark.parametrize("topology", ["ring", "complete", "star", "torus", "exponential", "tree", "random_regular"])
@pytest.mark.parametrize("dead", [[0], [3], [1, 2], [0, 4, 5]], ids=str)
def test_rewired_weights_are_doubly_stochastic_and_join_the_living(topology, dead):
    weights = Topology.parse(topology).weights(8)
    living = [rank for rank in range(8) if rank not in dead]
    left = rewired(weights, set(dead))[np.ix_(living, living)]
    assert np.array_equal(left, left.T)
    assert left.min() >= 0
    assert np.abs(left.sum(0) - 1).max() < 1e-15
    assert spectral_gap(left) > 0
    assert not rewired(weights, set(dead))[dead].any()


def test_a_ring_without_one_is_the_ring_of_the_others():
    left = np.delete(np.delete(rewired(RingGraph().weights(8), {3}), 3, 0), 3, 1)
    assert np.allclose(left, RingGraph().weights(7))
    assert np.array_equal(rewired(RingGraph().weights(8), set()), RingGraph().weights(8))


def spread_of_the_living(strategy, faults, steps, topology="ring", n=6):
    start = np.random.default_rng(0).normal(size=(n, 8))
    run = run_strategy(strategy, n, steps, job=STILL, replicas=start, faults=faults, network="link(1e6, 0.01)")
    living = np.delete(run.replicas, [int(fault[5]) for fault in faults], axis=0)
    return np.linalg.norm(living - living.mean(0)), living.mean(0)


@pytest.mark.parametrize("topology", ["ring", "star", "torus", "exponential", "tree"])
@pytest.mark.parametrize(
    "faults",
    [["dies(2, 0.3)"], ["dies(0, 0.3)"], ["dies(1, 0.3, noticed=5)"], ["dies(0, 0.3)", "dies(3, 0.5, noticed=1)"]],
    ids=str,
)
def test_the_others_agree_without_the_dead(topology, faults):
    strategy = f"dpsgd({topology})"
    assert spread_of_the_living(strategy, faults, 120)[0] < 0.01 * spread_of_the_living(strategy, faults, 25)[0]


@pytest.mark.parametrize("graph", ["ring", "graph(edges='0-1 1-2 2-0 2-3')"])
@pytest.mark.parametrize("at", [0.2, 0.31, 0.55])
def test_models_of_the_dead_may_arrive_after_the_news(graph, at):
    """Slow links: what a worker sent before it died is older than the step in which its neighbors read it."""
    run = run_strategy(f"dpsgd({graph})", 4, 20, faults=[f"dies(1, {at})"], network="link(1e4, 0.2)")
    steps = {rank: run.nodes[rank].step for rank in (0, 2, 3)}
    assert steps == {0: 20, 2: 20, 3: 20}
    assert np.isfinite(run.result).all()


@pytest.mark.parametrize("steps", [40, 41, 57])
def test_new_edges_keep_the_mean_of_the_living(steps):
    """Once the dead one has no part in it, the mean of the others stays, whatever they have under way at the end."""
    means = [spread_of_the_living("dpsgd", ["dies(2, 0.3)"], count)[1] for count in (30, steps)]
    assert np.abs(means[0] - means[1]).max() < 1e-15


class OneSided(NeighborAveraging):
    """Negative control: only the lower rank of a new edge moves."""

    async def worker(self, me):
        move = Bridges._move

        def cheat(bridges, me, message):
            if me.rank < message.source:
                move(bridges, me, message)
            else:
                bridges.sent.pop(message.source)

        me.state._move = functools.partial(cheat, me.state)
        await super().worker(me)


@pytest.mark.negative_control("strategy:dpsgd")
def test_the_mean_of_the_living_notices_a_new_edge_that_goes_one_way():
    means = [spread_of_the_living(OneSided(), ["dies(2, 0.3)"], count)[1] for count in (15, 40)]
    assert np.abs(means[0] - means[1]).max() > 1e-3


class NeverRewires(NeighborAveraging):
    """Negative control: leaves the gap open."""

    def worker_state(self, me):
        class Closed(Bridges):
            def offer(self, me, weights):
                pass

        return Closed()


def test_without_new_edges_two_deaths_cut_the_ring():
    faults = ["dies(0, 0.3)", "dies(3, 0.3)"]
    assert spread_of_the_living(NeverRewires(), faults, 120)[0] > 100 * spread_of_the_living("dpsgd", faults, 120)[0]


def test_a_lost_model_ends_the_run_with_a_sentence():
    with pytest.raises(
        PeerLost, match="the model of worker 0 at step 4 was lost: worker 1 received the model of step 5; start"
    ):
        run_strategy("dpsgd", 4, 20, faults=["drops(0, 1, 5)"])
