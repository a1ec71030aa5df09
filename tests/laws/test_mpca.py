"""MPCA-SGD against plain numpy: rounds in the background that nobody waits for, and averages moved on in time."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import pytest

from flockstep.errors import PeerLost
from flockstep.records.events import StepEvent
from flockstep.simulation.compute import ComputeModel
from flockstep.strategies.mpca import MpcaState, PenalizedAveraging
from flockstep.strategies.tree_server import family
from flockstep.testing.strategies import COMPUTE, GradientSource, bowl_job, equal_bits, run_strategy, small_job

F = np.float32


def tree_mean(snapshots):
    """The mean over the workers, summed up the binomial tree."""

    def total(rank):
        mine = snapshots[rank].copy()
        for child in family(rank, len(snapshots))[1]:
            mine += total(child)
        return mine

    return total(0) / F(len(snapshots))


def oracle(n, rho, gamma, steps):
    """Replicas where messages take no time: a round is over as soon as everyone has taken part."""
    source = GradientSource(n, small_job())
    w, g = [source.start() for _ in range(n)], [source.start() for _ in range(n)]
    durations = [ComputeModel.parse(COMPUTE).stream(0, rank) for rank in range(n)]
    due, ended = [(0.0, rank, 0) for rank in range(n)], set()
    means, snapshots, begun = [], {}, [[] for _ in range(n)]

    def take_part(rank, step):
        """In the next round, unless the last one that it took part in is still open."""
        if len(begun[rank]) > len(means):
            return
        begun[rank].append(step)
        snapshots[rank] = w[rank].copy()
        if len(snapshots) == n:
            means.append(tree_mean(snapshots))
            snapshots.clear()
            for other in ended if len(ended) < n else ():
                take_part(other, steps)

    while due:
        t, rank, step = heapq.heappop(due)
        if step > 0:
            w[rank] -= F(0.1) * g[rank]
        known = min(len(means), len(begun[rank]))
        if step == steps:
            ended.add(rank)
        take_part(rank, step)
        if step < steps:
            g[rank] = source.gradient(rank, w[rank])
            if known:
                g[rank] += F(rho) * (w[rank] - toward(means[:known], begun[rank][:known], gamma, step))
            heapq.heappush(due, (t + next(durations[rank]), rank, step + 1))
    return w


def toward(means, begun, gamma, step):
    """The last average, moved on by gamma times what lies between it and the one before."""
    if len(means) == 1:
        return means[-1]
    slope = (means[-1] - means[-2]) / F(begun[-1] - begun[-2])
    return means[-1] + F(gamma * (step - begun[-1])) * slope


def agrees(strategy, replicas, steps=25):
    run = run_strategy(strategy, len(replicas), steps, network="ideal")
    return all(equal_bits(one, other) for one, other in zip(run.replicas, replicas, strict=True))


@pytest.mark.parametrize(("n", "rho", "gamma"), [(2, 0.5, 0), (3, 0.5, 0.5), (4, 2.0, 1), (7, 1.0, 1), (1, 0.5, 0.5)])
@pytest.mark.oracle("strategy:mpca")
def test_equals_the_oracle(n, rho, gamma):
    expected = oracle(n, rho if n > 1 else 0, gamma, 25)
    assert agrees(PenalizedAveraging(rho, gamma), expected)


def waits(strategy, network, n=4, steps=12):
    """The longest time between what a worker's gradients take and the end of its last step."""
    run = run_strategy(strategy, n, steps, network=network)
    streams = [ComputeModel.parse(COMPUTE).stream(0, rank) for rank in range(n)]
    ends = {event.rank: event.seconds for event in run.of(StepEvent)}
    return max(ends[rank] - sum(next(streams[rank]) for _ in range(steps)) for rank in range(n))


@pytest.mark.parametrize("network", ["ideal", "100gbit", "100mbit", "link(1000, 0.1)", "link(10, 30)"])
def test_computing_never_waits(network):
    assert waits("mpca", network) < 1e-9


class WaitsForRounds(PenalizedAveraging):
    """Negative control: waits for the end of each round."""

    async def look_after(self, me):
        await super().look_after(me)
        await me.finished(me.task("round"))
        me.state.snapshot = None


@pytest.mark.negative_control("strategy:mpca")
def test_who_waits_for_rounds_is_noticed():
    assert waits(WaitsForRounds(), "100mbit") > 1e-3


class Straight(PenalizedAveraging):
    """Every replica moves along a line of its own; keeps (step, ŵ, age of the average in steps)."""

    @dataclass
    class Seen(MpcaState):
        points: tuple = ()

    def worker_state(self, me):
        return self.Seen()

    async def worker(self, me):
        while me.training:
            await self.look_after(me)
            toward = self.predicted(me.state, me.step)
            if toward is not None:
                me.state.points += ((me.step, toward.copy(), me.step - me.state.at),)
            await me.gradient()
            me.params += np.arange(8) * (me.rank + 1)


def errors(strategy, steps=60, network="link(1e9, 0.12)"):
    """Differences of every ŵ that extrapolates from the mean of the replicas at that step."""
    start = np.random.default_rng(0).integers(-8, 8, (4, 8)) * 1.0
    run = run_strategy(strategy, 4, steps, job=bowl_job(), compute="constant(0.05)", network=network, replicas=start)
    found = []
    for rank in range(4):
        for step, toward, age in run.nodes[rank].state.points:
            truth = start.mean(0) + step * np.arange(8) * 2.5
            found.append((step, age, float(np.abs(toward - truth).max())))
    return found


def test_a_linear_trajectory_is_extrapolated_exactly():
    found = errors(Straight(1, 1), network="100mbit")
    assert all(error == 0 for step, _, error in found if step >= 3)


class OnArrival(Straight):
    """Negative control: takes the average for one of the replicas as they are when it arrives."""

    async def look_after(self, me):
        if me.state.snapshot is not None and me.task("round").done:
            me.state.begun = me.step
        await super().look_after(me)


@pytest.mark.negative_control("strategy:mpca")
def test_the_line_notices_an_average_of_the_wrong_time():
    assert min(error for step, _, error in errors(OnArrival(1, 1)) if step >= 30) > 0


class Attracted(PenalizedAveraging):
    """Negative control: the penalty pushes away."""

    def penalty(self, me):
        pull = super().penalty(me)
        return None if pull is None else -pull


@pytest.mark.negative_control("strategy:mpca")
def test_the_oracle_notices_a_penalty_of_the_wrong_sign():
    assert not agrees(Attracted(0.5, 0.5), oracle(3, 0.5, 0.5, 25))


@pytest.mark.parametrize("n", [2, 4, 7])
def test_a_round_carries_a_model_up_and_down_each_edge(n):
    run = run_strategy("mpca", n, 20)
    up, down = run.sent("snapshot/round"), run.sent("mean/round")
    rounds = len(up) // (n - 1)
    assert rounds > 3
    assert len(up) == len(down) == rounds * (n - 1)
    assert sum(t.sent_bytes for t in run.totals.values()) == 2 * rounds * (n - 1) * 18 * 4
    assert {(s.message.source, s.to) for s in up} == {(s.to, s.message.source) for s in down}


@pytest.mark.parametrize("network", ["ideal", "1gbit", "link(1000, 0.3)"])
@pytest.mark.parametrize("n", [2, 5])
def test_the_last_round_averages_the_final_replicas(n, network):
    run = run_strategy("mpca", n, 15, network=network)
    assert equal_bits(run.sent("mean/round")[-1].message.array, tree_mean(run.replicas))


def test_a_dead_worker_ends_the_run():
    with pytest.raises(PeerLost, match="worker 1 died"):
        run_strategy("mpca", 3, 40, faults=["dies(1, 0.3)"])
