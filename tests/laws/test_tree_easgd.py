"""EASGD on a tree against plain numpy: who hears whom and when, convexity, and what a dead parent leaves behind."""

from __future__ import annotations

import heapq
from collections import Counter

import numpy as np
import pytest

from flockstep.messages import LEAVE
from flockstep.records.events import StepEvent, UpdateEvent
from flockstep.simulation.compute import ComputeModel
from flockstep.strategies.tree_easgd import TreeElasticAveraging
from flockstep.testing.strategies import COMPUTE, GradientSource, Sent, bowl_job, equal_bits, run_strategy, small_job


def edges(n, branching, up, down, upper):
    """(from, to, period) for every edge, both ways."""
    found = []
    for child in range(1, n):
        parent, leaf = (child - 1) // branching, branching * child + 1 >= n
        found += [(child, parent, up if leaf else upper), (parent, child, down if leaf else upper)]
    return found


def oracle(n, branching, up, down, upper, alpha, steps):
    """Replicas where messages take no time: each is waiting when its receiver's next step begins."""
    gradient_source = GradientSource(n, small_job())
    w, inbox = [gradient_source.start() for _ in range(n)], [[] for _ in range(n)]
    g, tree = [gradient_source.gradient(rank, w[rank]) for rank in range(n)], edges(n, branching, up, down, upper)
    durations = [ComputeModel.parse(COMPUTE).stream(0, rank) for rank in range(n)]
    due = [(next(durations[rank]), rank, 1) for rank in range(n)]
    heapq.heapify(due)
    while due:
        t, rank, step = heapq.heappop(due)
        w[rank] -= np.float32(0.1) * g[rank]
        for source, to, period in tree:
            if source == rank and step % period == 0:
                inbox[to].append(w[rank].copy())
        for listener in [rank] if due else range(n):
            for x in inbox[listener]:
                w[listener] -= np.float32(alpha) * (w[listener] - x)
            inbox[listener].clear()
        if step < steps:
            g[rank] = gradient_source.gradient(rank, w[rank])
            heapq.heappush(due, (t + next(durations[rank]), rank, step + 1))
    return w


def agrees(strategy, replicas, steps=20, **options):
    run = run_strategy(strategy, len(replicas), steps, network="ideal", **options)
    return all(equal_bits(one, other) for one, other in zip(run.replicas, replicas, strict=True))


@pytest.mark.parametrize(
    ("n", "settings"),
    [
        (2, (1, 1, 1, 1, 0.3)),
        (4, (4, 2, 3, 5, 0.2)),
        (7, (2, 2, 3, 4, 0.3)),
        (7, (2, 1, 1, 1, 0.3)),
        (4, (1, 2, 2, 1, 0.5)),
    ],
)
@pytest.mark.oracle("strategy:tree_easgd")
def test_equals_the_oracle(n, settings):
    assert agrees(TreeElasticAveraging(*settings), oracle(n, *settings, steps=20))


def test_alpha_follows_from_the_number_of_neighbors():
    assert TreeElasticAveraging(16).rate == 0.9 / 17
    assert agrees(TreeElasticAveraging(2, 2, 3, 4), oracle(7, 2, 2, 3, 4, 0.3, 20))


@pytest.mark.parametrize("steps", [20, 23])
@pytest.mark.parametrize(("n", "branching"), [(7, 2), (16, 4), (4, 1), (5, 16)])
def test_every_edge_carries_a_model_each_period(steps, n, branching):
    run = run_strategy(TreeElasticAveraging(branching, 3, 4, 5), n, steps)
    sent = Counter((s.message.source, s.to) for s in run.sent("model"))
    expected = {(source, to): steps // period for source, to, period in edges(n, branching, 3, 4, 5)}
    assert sent == expected
    assert sum(t.sent_bytes for t in run.totals.values()) == sum(expected.values()) * 18 * 4
    assert run.deliveries() == {
        (to, source): expected.get((source, to), 0) for to in range(n) for source in range(n) if to != source
    }


def between(run, after):
    """(from, to) of the models that were sent after that time."""
    return {(s.message.source, s.to) for s in run.sent("model") if s.t > after}


def test_the_children_of_a_dead_worker_turn_to_its_parent():
    run = run_strategy("tree_easgd(2, 1, 1, 1)", 7, 40, faults=["dies(1, 0.5)"])
    taken = Counter(event.rank for event in run.of(StepEvent))
    assert all(taken[rank] == 40 for rank in (0, 2, 3, 4, 5, 6))
    noticed = max(s.t for s in run.sent("model") if s.to == 1)
    assert between(run, noticed) == {(0, 2), (2, 0), (0, 3), (3, 0), (0, 4), (4, 0), (2, 5), (5, 2), (2, 6), (6, 2)}


def test_without_its_root_the_tree_falls_apart_and_learns_on():
    job = bowl_job("sgd(lr=0.1)", noise=0)
    run = run_strategy("tree_easgd(2, 1, 1, 1)", 7, 200, job=job, faults=["dies(0, 0.5)"])
    noticed = max(s.t for s in run.sent("model") if s.to == 0)
    assert between(run, noticed) == {(1, 3), (3, 1), (1, 4), (4, 1), (2, 5), (5, 2), (2, 6), (6, 2)}
    assert np.abs(run.replicas[1:] - 1).max() < 0.2 < 0.5 < np.abs(run.replicas[0] - 1).max()


def test_nobody_waits_before_the_last_step():
    """However slow the network and however slow one worker, the others' steps follow each other at once."""
    run = run_strategy(
        "tree_easgd(2, 1, 1, 1)", 7, 10, compute="constant(0.05)", network="link(100, 1)", faults=["slows(0, 10)"]
    )
    for rank in range(1, 7):
        assert np.allclose([e.seconds for e in run.of(StepEvent) if e.rank == rank], 0.05 * np.arange(1, 11))


def test_everyone_absorbs_what_is_in_flight_at_the_end():
    run = run_strategy("tree_easgd(2, 1, 1, 1)", 7, 10, network="link(1000, 0.5)")
    assert len(run.of(UpdateEvent)) == len(run.sent("model")) == 10 * 12
    assert isinstance(run.sent(LEAVE)[0], Sent)


class Upwards(TreeElasticAveraging):
    """Negative control: parents do not tell their children."""

    def children(self, rank, workers, lost):
        return []


class Overshoots(TreeElasticAveraging):
    """Negative control: beyond what was received."""

    def approach(self, me, message):
        me.params -= (1 + self.rate) * (me.params - message.payload)


class Late(TreeElasticAveraging):
    """Negative control: what came during a gradient is taken in after the step, before the model is sent on."""

    async def worker(self, me):
        while me.training:
            me.optimizer_step(await me.gradient())
            for message in me.arrived("model"):
                self.approach(me, message)
            me.send_all(self.due(me), "model", me.params)


@pytest.mark.parametrize("broken", [Upwards, Overshoots, Late])
@pytest.mark.negative_control("strategy:tree_easgd")
def test_the_oracle_notices_what_is_broken(broken):
    expected = oracle(7, 2, 2, 3, 4, 0.3, 20)
    assert agrees(TreeElasticAveraging(2, 2, 3, 4, 0.3), expected)
    assert not agrees(broken(2, 2, 3, 4, 0.3), expected)
