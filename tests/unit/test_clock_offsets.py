"""Clocks of hosts differ: each node's offset is measured, recorded, and taken out of the times of its events."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flockstep.arrays.schema import Schema
from flockstep.expression import to_data
from flockstep.optimizers.sgd import SGD
from flockstep.records.events import ClockEvent, NodeEvent, ScalarEvent
from flockstep.records.folder import RunFolder
from flockstep.runtime.clock import ROUND_TRIPS, RoundTrip, offset_of
from flockstep.runtime.member import Member, NodeSpec
from flockstep.runtime.node_creation import Stepping, make_worker
from flockstep.runtime.plan import LocalOptimizer
from flockstep.runtime.real import NodeConnection
from flockstep.strategies.base import Strategy
from support.jobs import run_of, supervised

delays = st.floats(0.0, 10.0)


@given(
    st.floats(-1e6, 1e6),
    st.lists(st.tuples(st.floats(0.0, 1e6), delays, delays, delays), min_size=1, max_size=ROUND_TRIPS),
)
def test_the_offset_is_within_its_uncertainty_whatever_the_delays(
    offset: float, trips: list[tuple[float, float, float, float]]
) -> None:
    """`offset`: the supervisor's clock minus the node's; a message takes `there`, one is answered after `held`."""
    measured = [
        RoundTrip(sent, sent + offset + there, sent + offset + there + held, sent + there + held + back)
        for sent, there, held, back in trips
    ]
    found = offset_of(measured)
    shortest = min(there + back for _, there, _, back in trips)
    assert found.uncertainty == pytest.approx(shortest / 2, abs=1e-8)
    assert abs(found.seconds - offset) <= found.uncertainty + 1e-8


def test_times_of_a_host_with_another_clock_are_recorded_on_the_supervisors(tmp_path: Path) -> None:
    ahead = {0: 0.0, 1: 1000.0}
    nodes: list[threading.Thread] = []

    def start(node_spec: NodeSpec) -> None:
        nodes.append(threading.Thread(target=took_part, args=(node_spec, ahead[node_spec.address])))
        nodes[-1].start()

    supervisor = supervised(run_of(2), tmp_path, start)
    outcome = supervisor.run()
    for node in nodes:
        node.join()
    supervisor.collection.forget()
    assert outcome.error is None
    went = supervisor.peers.went
    assert went is not None
    events = RunFolder(tmp_path).read_events()
    clocks = {event.node: event for event in events if isinstance(event, ClockEvent)}
    for rank, clock in clocks.items():
        assert 0 < clock.uncertainty_seconds < 100
        assert abs(clock.offset_seconds + ahead[rank]) <= clock.uncertainty_seconds
    for rank in ahead:
        error, mine = clocks[rank].uncertainty_seconds, [e for e in events if getattr(e, "node", None) == rank]
        before, after = (e.value - went for e in mine if isinstance(e, ScalarEvent))
        (end,) = [e.seconds for e in mine if isinstance(e, NodeEvent)]
        assert before - error <= end <= after + error


def took_part(node_spec: NodeSpec, ahead: float) -> None:
    """A worker without steps, on a host whose clock is `ahead` seconds ahead; it records when it ended, twice."""
    schema, strategy, optimizer = Schema.of({"w": (3,)}), Strategy.parse("ensemble"), SGD(lr=0.1)
    member = Member(node_spec, schema, now=lambda: time.monotonic() + ahead)
    cluster, params = member.join("ensemble", to_data(optimizer), np.zeros(3, np.float32))
    stepper = LocalOptimizer(optimizer, params := params.copy())
    worker = make_worker(strategy, cluster, node_spec.address, params, schema, 0, Stepping(stepper, optimizer))
    member.begin()
    connection = NodeConnection(member, worker, strategy)
    metrics = connection.runner.metrics
    metrics.scalar(member.seconds(), "before", time.monotonic())
    metrics.close(member.seconds(), params)
    metrics.scalar(member.seconds(), "after", time.monotonic())
    connection.send_snapshot(float("inf"))
    member.wait_for_end()
    member.close(0.0)
