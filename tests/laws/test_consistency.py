"""Who may read and what may be seen: the windows of stale synchronous parallel, from a record of all messages."""

from __future__ import annotations

from collections import Counter

import pytest

from flockstep.messages import server
from flockstep.records.events import UpdateEvent
from flockstep.strategies.consistency import (
    Asynchronous,
    BulkSynchronous,
    Consistency,
    StaleSynchronous,
)
from flockstep.strategies.parameter_server import ParameterServer
from flockstep.testing.strategies import Sent, equal_bits, run_strategy

STEPS = 30
STRAGGLER = "speeds(exponential(0.05), (1, 1, 2, 8))"
FAR_AWAY = "two_tier(3, 1e9, 0, 2000, 0)"
"""Worker 3 sits behind a slow link: while its push and the reply travel, the others have time to push."""
NETWORKS = ["ideal", "1gbit", "link(5000, 0.02)", FAR_AWAY]


def reads(run, shard=0):
    """For every read that a server answered: reader, its clock, the clocks of all, and the updates of each in it."""
    clocks, applied, found = Counter(), Counter(), []
    workers = range(run.simulation.plan.cluster.workers)
    for entry in run.simulation.log:
        if isinstance(entry, UpdateEvent) and entry.node == server(shard):
            applied[entry.source] += entry.count
        elif isinstance(entry, Sent) and entry.message.tag == "push" and entry.to == server(shard):
            clocks[entry.message.source] += 1
        elif isinstance(entry, Sent) and entry.message.reply_to and entry.message.source == server(shard):
            everyone = [clocks[rank] for rank in workers]
            found.append((entry.to, clocks[entry.to], everyone, [applied[rank] for rank in workers]))
    return found


def gaps(run, shard=0):
    """How far each reader is ahead of the slowest when it begins to compute."""
    return [clock - min(everyone) for _, clock, everyone, _ in reads(run, shard)]


def outside_the_window(run, s, shard=0):
    """What is wrong with the reads: at clock c, updates with timestamp <= c - s - 1 and one's own must be in it, and
    none with timestamp > c + s - 1 may be."""
    wrong = set()
    for reader, clock, _, applied in reads(run, shard):
        if applied[reader] < clock:
            wrong.add("misses its own")
        if min(applied) < clock - s:
            wrong.add("misses another's")
        if max(applied) > max(clock + s, clock):
            wrong.add("sees too far")
    return wrong


def applied_too_early(run, s, shard=0):
    """The updates (worker, timestamp) that were applied while a read of the slowest worker might not have shown them.

    A push and the read in it arrive together, so that no read can tell; the parameters of the server can.
    """
    clocks, applied, found = Counter(), Counter(), []
    workers = range(run.simulation.plan.cluster.workers)
    for entry in run.simulation.log:
        if isinstance(entry, UpdateEvent) and entry.node == server(shard):
            if applied[entry.source] > min(clocks[rank] for rank in workers) + s - 1:
                found.append((entry.source, applied[entry.source]))
            applied[entry.source] += entry.count
        elif isinstance(entry, Sent) and entry.to == server(shard) and entry.message.tag == "push":
            clocks[entry.message.source] += 1
    return found


@pytest.mark.parametrize("s", [0, 1, 2, 5])
@pytest.mark.parametrize("network", NETWORKS)
def test_nobody_computes_more_than_s_clocks_ahead(s, network):
    run = run_strategy(f"ps(ssp({s}))", 4, STEPS, compute=STRAGGLER, network=network)
    assert len(gaps(run)) == 4 * STEPS
    assert max(gaps(run)) <= s
    if network == "ideal":
        assert max(gaps(run)) == s  # the bound is used to the full


def test_without_a_bound_the_fast_run_ahead():
    """Negative control of the previous test: without a bound, fast workers run ahead."""
    assert max(gaps(run_strategy("asgd", 4, STEPS, compute=STRAGGLER))) > 5


@pytest.mark.parametrize("s", [0, 1, 2, 5])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("shards", [1, 3])
def test_every_read_sees_what_it_must_and_nothing_that_it_may_not(s, network, shards):
    for compute in (STRAGGLER, "pareto(0.05, 1.2)", "exponential(0.001)"):
        run = run_strategy(f"ps(ssp({s}), shards={shards})", 4, STEPS, compute=compute, network=network)
        for shard in range(shards):
            assert outside_the_window(run, s, shard) == set()
            assert applied_too_early(run, s, shard) == []


@pytest.mark.parametrize("s", [0, 2])
def test_staleness_is_bounded(s):
    """Between a read at clock c and its application each other worker moves from >= c - s to <= c + s updates."""
    for network in NETWORKS:
        run = run_strategy(f"ps(ssp({s}))", 4, 60, compute=STRAGGLER, network=network)
        assert max(event.staleness for event in run.of(UpdateEvent)) <= 3 * 2 * s
    late = run_strategy("asgd", 4, 60, compute=STRAGGLER)
    assert max(event.staleness for event in late.of(UpdateEvent)) > 3 * 2


class Eager(StaleSynchronous):
    """Negative control: applies everything on arrival, also what the slowest may not see yet."""

    def released(self, pending, view):
        return [[push] for push in pending]


class Late(StaleSynchronous):
    """Negative control: applies what everyone has pushed only, so that a reader misses its own updates."""

    def released(self, pending, view):
        return BulkSynchronous().released(pending, view)


class OneMore(StaleSynchronous):
    """Negative control: admits one clock too far."""

    def admitted(self, reads, view):
        return [read for read in reads if read.clock - self.s - 1 <= view.slowest]


@pytest.mark.parametrize(
    ("rule", "reads_wrong", "early"),
    [
        (Eager(1), set(), True),
        (Late(1), {"misses its own"}, False),
        (OneMore(1), {"misses its own", "misses another's"}, False),
        (Asynchronous(), {"misses another's", "sees too far"}, True),
        (StaleSynchronous(1), set(), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Consistency) else "",
)
def test_the_window_notices_another_rule(rule, reads_wrong, early):
    run = run_strategy(ParameterServer(rule), 4, STEPS, compute="exponential(0.001)", network=FAR_AWAY)
    assert outside_the_window(run, 1) == reads_wrong
    assert bool(applied_too_early(run, 1)) == early


@pytest.mark.parametrize("compute", ["constant(0.1)", "exponential(0.05)", STRAGGLER])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("shards", [1, 3])
def test_no_slack_is_bulk_synchronous_in_every_bit_and_moment(compute, network, shards):
    options = {"steps": 15, "compute": compute, "network": network}
    one, other = (run_strategy(f"ps({rule}, shards={shards})", **options) for rule in ("ssp(0)", "bsp"))
    assert equal_bits(one.result, other.result)
    assert one.events == other.events


@pytest.mark.parametrize("network", NETWORKS)
def test_a_bound_that_never_binds_is_asynchronous_in_every_bit_and_moment(network):
    """With the paper's sum. By default each gradient counts as 1/n of a step: the same moments, other parameters."""
    options = {"steps": 15, "compute": STRAGGLER, "network": network}
    rules = ("ssp(1000000, weight=sum)", "asynchronous", "ssp(2, weight=sum)", "ssp(1000000)")
    one, other, bound, mean = (run_strategy(f"ps({rule})", **options) for rule in rules)
    assert equal_bits(one.result, other.result)
    assert one.events == other.events
    assert one.events != bound.events
    assert not equal_bits(one.result, mean.result)
    assert one.seconds == mean.seconds
