"""Snapshots of the model as it is now: those of a record where everyone waits, earlier ones where nobody does."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.nodes import Cluster
from flockstep.planning.trials import LiveSimulation
from flockstep.records.events import EvaluationEvent, Event
from flockstep.runtime.plan import Plan
from flockstep.runtime.virtual import Simulation
from flockstep.simulation.compute import ComputeModel
from flockstep.simulation.network import Network
from flockstep.strategies.base import Strategy, choose_result
from flockstep.testing.strategies import GradientSource, small_job

WORKERS, STEPS = 4, 40


def snapshots(kind: type[Simulation], text: str, compute: str, every: int = 1) -> list[EvaluationEvent]:
    strategy = Strategy.parse(text)
    source, seen = GradientSource(WORKERS, small_job(), 0), list[Event]()
    cluster = Cluster(WORKERS, strategy.servers_for(WORKERS))
    policy = choose_result(strategy, None)
    plan = Plan(strategy, cluster, source.engine.optimizer, source.parts, 8, STEPS, 0, policy, every)
    kind(source.engine, plan, ComputeModel.parse(compute), Network.parse("1gbit"), seen.append).run()
    return [event for event in seen if isinstance(event, EvaluationEvent)]


@pytest.mark.parametrize("text", ["all_reduce", "ps", "ps(shards=2)", "local_sgd(period=2)"])
def test_the_same_models_where_everyone_waits(text: str) -> None:
    record = [one.loss for one in snapshots(Simulation, text, "constant(0.1)")]
    live = [one.loss for one in snapshots(LiveSimulation, text, "constant(0.1)")]
    assert len(live) == len(record) == STEPS + 1
    if text == "local_sgd(period=2)":  # in between, means are rounded in another order
        np.testing.assert_allclose(live, record, rtol=1e-5)
    else:
        assert live == record


@pytest.mark.parametrize("text", ["ps(consistency=asynchronous)", "broadcast", "gossip"])
def test_slow_workers_do_not_hold_the_news_back(text: str) -> None:
    law = "speeds(constant(0.1), (1, 1, 1, 10))"
    first, live = (snapshots(kind, text, law) for kind in (Simulation, LiveSimulation))
    goal = 0.7 * first[0].loss + 0.3 * min(one.loss for one in first)
    late, early = (next(one.seconds for one in seen if one.loss <= goal) for seen in (first, live))
    assert early < late


def test_as_often_as_asked() -> None:
    assert len(snapshots(LiveSimulation, "all_reduce", "constant(0.1)", every=4)) == STEPS // 4 + 1
    times = [one.seconds for one in snapshots(LiveSimulation, "gossip", "exponential(0.1)")]
    assert times == sorted(times)
