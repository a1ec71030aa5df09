"""Measures simulated worker-steps per second, compared with a plain loop and with batched gradient calls alone.

A worker-step is a gradient and what follows until the next gradient. Evaluations of models are no part of a worker-step
and are left out, because a plain loop evaluates nothing.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.frameworks.base import Engine, Evaluation, Indices, Job
from flockstep.frameworks.job import make_engine
from flockstep.frameworks.numpy import NumpyEngine
from flockstep.nodes import Cluster
from flockstep.optimizers.sgd import SGD
from flockstep.report.progress import ProgressCallback, silent
from flockstep.runtime.plan import Plan
from flockstep.runtime.virtual import Simulation
from flockstep.simulation.compute import ComputeModel
from flockstep.simulation.network import Network
from flockstep.strategies.base import Strategy, choose_result
from flockstep.workloads.base import Workload

REPLICAS = (16, 64, 256)
STRATEGIES = ("local_sgd(collective=recursive_doubling)", "gossip", "asgd", "bsp", "dpsgd")
ROUNDS = 20
STEPS = 20
"""Number of steps that each worker takes in a measured simulation."""
BATCH = 8
LR = 1e-6
"""Learning rate that keeps asynchronous training with a thousand workers stable."""
LOOP, BATCHED = "plain loop", "batched call"


@dataclass
class SimulatorFigure:
    """Median measurements of simulating one strategy with a given number of workers."""

    strategy: str
    replicas: int
    rate: float
    """Simulated steps of all workers per second of real time."""
    to_loop: float
    """Simulated worker-steps per second, divided by the steps per second of a loop that computes one gradient and one
    optimizer step at a time.
    """
    to_batched: float
    """Simulated worker-steps per second, divided by the gradients per second of batched calls that compute only
    gradients.
    """
    events: float | None = None
    """Number of events written to the record per second of real time."""


MeasuredProgram = Callable[[], tuple[int, int]]
"""Function that runs a measured program once and returns the numbers of worker-steps and of recorded events."""


def measure(
    strategies: Sequence[str] = STRATEGIES,
    replicas: Sequence[int] = REPLICAS,
    rounds: int = ROUNDS,
    steps: int = STEPS,
    workload: str = "softmax",
    say: ProgressCallback = silent,
) -> list[SimulatorFigure]:
    """Measure the simulation of `workload`, a plain training loop and batched gradient calls in turns.

    The measurement uses batches of 8 samples, lognormal compute times, links of 10 Gbit/s, and one thread of torch.
    No model is evaluated.
    """
    job = replace(Workload.parse(workload), batch=BATCH, optimizer=SGD(lr=LR)).job(0)  # type: ignore[type-var]
    engine = make_engine(job, 0)
    engine.evaluate = engine.evaluate_together = _not_evaluated  # type: ignore[method-assign, assignment]
    figures = []
    for count in replicas:
        implementations = {LOOP: _loop(job, engine, count), BATCHED: _batched(engine, count)}
        implementations |= {text: _simulated(engine, text, count, steps) for text in strategies}
        rates: dict[str, list[float]] = {name: [] for name in implementations}
        events: dict[str, list[float]] = {name: [] for name in implementations}
        for number in range(-1, rounds):  # the first round warms up
            say(f"{count} replicas, round {number + 1} of {rounds}", number + 1, rounds + 1)
            for name, implementation in implementations.items():
                start = time.perf_counter()
                done, recorded = implementation()
                spent = time.perf_counter() - start
                if number >= 0:
                    rates[name].append(done / spent)
                    events[name].append(recorded / spent)
        for name, mine in rates.items():
            to_loop, to_batched = (_ratio(mine, rates[other]) for other in (LOOP, BATCHED))
            recorded_rate = statistics.median(events[name]) if name in strategies else None
            figures.append(SimulatorFigure(name, count, statistics.median(mine), to_loop, to_batched, recorded_rate))
    return figures


def _ratio(mine: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(mine, others, strict=True))


def _not_evaluated(params: FlatArray, ranks: Sequence[int]) -> Evaluation:
    """Stand in for the evaluation of a model, which is no part of a worker-step."""
    return Evaluation(0.0, 0.0)


def _indices(engine: Engine, replicas: int) -> Indices:
    return np.random.default_rng(1).integers(0, engine.train_size, (replicas, BATCH))


def _loop(job: Job, engine: Engine, replicas: int) -> MeasuredProgram:
    """A loop that computes a gradient and a plain SGD step for one replica after the other."""
    if not isinstance(engine, NumpyEngine):
        return _torch_loop(job, _indices(engine, replicas))
    params, indices = np.tile(engine.initial(), (replicas, 1)), _indices(engine, replicas)
    out = np.empty_like(params)

    def run() -> tuple[int, int]:
        for rank in range(replicas):
            one = slice(rank, rank + 1)
            engine.gradients(params[one], indices[one], out[one], range(rank, rank + 1), [0])
            params[rank] -= LR * out[rank]
        return replicas, 0

    return run


def _torch_loop(job: Job, indices: Indices) -> MeasuredProgram:
    """The same loop in torch, where each replica has its own model and optimizer."""
    torch, loss = sys.modules["torch"], job.loss
    assert loss is not None
    torch.set_num_threads(1)
    models = [job.model() for _ in indices]
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR) for model in models]
    data = job.data()
    x, y = torch.as_tensor(data.train_x), torch.as_tensor(data.train_y)
    rows = torch.as_tensor(indices)

    def run() -> tuple[int, int]:
        for row, model, optimizer in zip(rows, models, optimizers, strict=True):
            loss(model(x[row]), y[row]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return len(models), 0

    return run


def _batched(engine: Engine, replicas: int) -> MeasuredProgram:
    """Batched calls for the gradients of all replicas, repeated often enough to be timed."""
    params, indices = np.tile(engine.initial(), (replicas, 1)), _indices(engine, replicas)
    out, calls = np.empty_like(params), max(1, 512 // replicas)

    def run() -> tuple[int, int]:
        for _ in range(calls):
            engine.gradients(params, indices, out, range(replicas), [0] * replicas)
        return calls * replicas, 0

    return run


def _simulated(engine: Engine, text: str, replicas: int, steps: int) -> MeasuredProgram:
    """A whole simulation, including the events of its record, but without evaluations of models."""
    strategy = Strategy.parse(text)
    parts = np.array_split(np.arange(engine.train_size), replicas)
    cluster, result = Cluster(replicas, strategy.servers), choose_result(strategy, None)
    plan = Plan(strategy, cluster, engine.optimizer, parts, BATCH, steps, 0, result, steps)
    compute, network = ComputeModel.parse("lognormal(0.05)"), Network.parse("10gbit")

    def run() -> tuple[int, int]:
        events: list[object] = []
        simulation = Simulation(engine, plan, compute, network, events.append)
        simulation.run()
        simulation.close()
        return replicas * steps, len(events)

    return run
