"""A small job whose model is a chain of layers, and runs of it, split or not, in virtual time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.torch import TorchEngine
from flockstep.partitions.base import Partition
from flockstep.records.events import EvaluationEvent, Event, StepEvent
from flockstep.runtime.plan import Plan
from flockstep.runtime.virtual import Simulation
from flockstep.runtime.virtual_split import SplitSimulation
from flockstep.simulation.compute import ComputeModel
from flockstep.simulation.faults import Fault
from flockstep.simulation.network import Network
from flockstep.split.splitting import make_split
from flockstep.strategies.base import Strategy, choose_result
from flockstep.workloads.models import squared_error
from flockstep.workloads.split import Iid

BATCH = 12
GRADIENT = 0.012
"""Seconds of a gradient of the whole model."""


def chain(seed: int = 3) -> nn.Sequential:
    """Five layers of float64 with Tanh between them."""
    torch.manual_seed(seed)
    sizes = (6, 8, 8, 7, 5, 1)
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double()


def tied() -> nn.Sequential:
    """A chain whose second and third layer share a weight, and have a bias each."""
    layers = list(chain())[:4]
    again = nn.Linear(8, 8).double()
    again.weight = layers[2].weight
    return nn.Sequential(*layers, again, nn.Tanh(), nn.Linear(8, 1).double())


def job_of(model: Callable[[], nn.Module] = chain, batch: int = BATCH, optimizer: str = "sgd(lr=0.2)") -> Job:
    """A regression on 120 samples of six numbers."""
    random = np.random.default_rng(0)
    x = random.standard_normal((160, 6))
    y = np.tanh(x @ random.standard_normal((6, 1)))
    return Job(
        model=model,
        data=lambda: Data(x[:120], y[:120], x[120:], y[120:]),
        optimizer=optimizer,
        loss=squared_error,
        metric=lambda outputs, targets: float(squared_error(outputs, targets)),
        higher_is_better=False,
        batch=batch,
        name="chain",
    )


@dataclass
class Ran:
    """A run that has ended."""

    simulation: Simulation | SplitSimulation
    events: list[Event]

    @property
    def result(self) -> np.ndarray:
        """The resulting model in the order of the unsplit model."""
        found = self.simulation.tracker.result
        assert found is not None
        if isinstance(self.simulation, SplitSimulation):
            return np.asarray(self.simulation.model.engine.in_order(found))
        return np.asarray(found)


def simulated(
    job: Job,
    strategy: str,
    partition: str | Partition | None = None,
    *,
    replicas: int = 2,
    steps: int = 6,
    compute: str = f"constant({GRADIENT})",
    network: str = "ideal",
    faults: tuple[str, ...] = (),
    prepare: Callable[[SplitSimulation], None] = lambda simulation: None,
) -> Ran:
    """Run the job on `replicas` replicas, split as `partition` says."""
    events: list[Event] = []
    chosen = Strategy.parse(strategy)
    split = None if partition is None else make_split(job, 0, Partition.parse(partition))
    engine = TorchEngine(job, 0) if split is None else split.engine
    parts = Iid().assign(engine.labels, engine.train_size, replicas, 0)
    policy = choose_result(chosen, None)
    plan = Plan(chosen, chosen.cluster(replicas), engine.optimizer, parts, job.batch, steps, 0, policy, 3)
    plan = dataclasses.replace(plan, faults=tuple(map(Fault.parse, faults)))
    models = ComputeModel.parse(compute), Network.parse(network)
    simulation: Simulation | SplitSimulation
    if split is None:
        simulation = Simulation(engine, plan, *models, events.append)
    else:
        simulation = SplitSimulation(split, plan, *models, events.append)
        prepare(simulation)
    simulation.run()
    simulation.stop()
    return Ran(simulation, events)


def check_trains_as_whole(job: Job, strategy: str, partition: str) -> None:
    """Check that the split model trains as the unsplit model in float64: parameters, losses and evaluations."""
    whole, split, parts = (
        simulated(job, strategy),
        simulated(job, strategy, partition),
        Partition.parse(partition).parts,
    )
    np.testing.assert_allclose(split.result, whole.result, rtol=0, atol=1e-12)
    assert np.abs(whole.result - TorchEngine(job, 0).initial()).max() > 0.01
    losses = [
        {(e.rank // count, e.step): e.loss for e in ran.events if isinstance(e, StepEvent)}
        for ran, count in ((whole, 1), (split, parts))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-11)
    tests = [{e.step: e.loss for e in ran.events if isinstance(e, EvaluationEvent)} for ran in (whole, split)]
    assert len(tests[0]) > 1
    assert tests[0] == pytest.approx(tests[1], rel=1e-11)


def job() -> Job:
    """The job of this file, for runs of processes."""
    return job_of(optimizer="sgd(lr=0.2, momentum=0.9)")
