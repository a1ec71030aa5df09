"""Trains a small model in virtual time, whole or split over workers, for the claims about partitions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.frameworks.base import Engine
from flockstep.records.events import Event, NodeEvent
from flockstep.runtime.plan import Plan
from flockstep.runtime.virtual import Simulation
from flockstep.runtime.virtual_split import SplitSimulation
from flockstep.simulation.compute import ComputeModel
from flockstep.simulation.network import Network
from flockstep.split.stages import SplitModel
from flockstep.strategies.base import Strategy
from flockstep.workloads.split import Iid


@dataclass(frozen=True)
class SmallRun:
    """What a run in virtual time has sent, how long it took, and how it ended."""

    plan: Plan
    nodes: list[NodeEvent]
    """Totals of each worker, in order of rank."""
    seconds: float
    params: FlatArray
    """Final parameters, in the order of the unsplit model."""


def ran(
    model: Engine | SplitModel,
    strategy: Strategy,
    batch: int,
    steps: int,
    seed: int,
    compute: ComputeModel,
    network: Network,
    replicas: int = 1,
) -> SmallRun:
    """Train `replicas` whole or split replicas; the resulting model is their mean."""
    engine, events = model if isinstance(model, Engine) else model.engine, list[Event]()
    parts = Iid().assign(engine.labels, engine.train_size, replicas, seed)
    plan = Plan(strategy, strategy.cluster(replicas), engine.optimizer, parts, batch, steps, seed, "mean", steps)
    run = (
        Simulation(model, plan, compute, network, events.append)
        if isinstance(model, Engine)
        else SplitSimulation(model, plan, compute, network, events.append)
    )
    run.run()
    run.stop()
    assert run.tracker.result is not None
    nodes = sorted((one for one in events if isinstance(one, NodeEvent)), key=lambda one: one.node)
    return SmallRun(plan, nodes, run.now, engine.as_saved(run.tracker.result)[0])


def distance(one: FlatArray, other: FlatArray) -> float:
    """Return the distance between parameters, relative to the norm of `other`."""
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))
