"""Worker-steps per second in virtual time, compared with a plain loop over the same gradients."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flockstep.drivers.plan import Plan
from flockstep.drivers.virtual import Simulation
from flockstep.frameworks.numpy import NumpyEngine
from flockstep.nodes import Cluster
from flockstep.optimizers.sgd import SGD
from flockstep.simulation.compute import ComputeModel
from flockstep.simulation.network import Network
from flockstep.strategies.base import Strategy, choose_result
from flockstep.workloads.softmax import Softmax

REPLICAS = (16, 64, 256)
STRATEGIES = ("local_sgd(collective=recursive_doubling)", "gossip", "asgd", "bsp", "dpsgd")
ROUNDS = 20
STEPS = 20
"""Steps of each worker in a simulation."""
BATCH = 8
LOOP = "plain loop"


@dataclass
class SimulatorFigure:
    """Rates of one strategy with one number of replicas, medians over the rounds."""

    strategy: str
    replicas: int
    rate: float
    """Simulated steps of all workers per second."""
    to_loop: float
    """Ratio to the rate of a loop that computes one gradient and one optimizer step after the other."""
    events: float | None = None
    """Events written to the record per second."""


def measure(
    strategies: Sequence[str] = STRATEGIES,
    replicas: Sequence[int] = REPLICAS,
    rounds: int = ROUNDS,
    say: Callable[[str], None] = lambda what: None,
) -> list[SimulatorFigure]:
    """Measure softmax regression with 200 weights, batch 8, lognormal compute times and 10 Gbit/s links, all strategies
    in turn.
    """
    engine = NumpyEngine(Softmax(batch=BATCH, optimizer=SGD(lr=1e-6)).job(0), 0)
    figures = []
    for count in replicas:
        ways = {LOOP: _loop(engine, count)} | {text: _simulated(engine, text, count) for text in strategies}
        rates: dict[str, list[float]] = {name: [] for name in ways}
        events: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(-1, rounds):  # the first round warms up
            say(f"{count} replicas, round {number + 1} of {rounds}")
            for name, way in ways.items():
                start = time.perf_counter()
                steps, recorded = way()
                spent = time.perf_counter() - start
                if number >= 0:
                    rates[name].append(steps / spent)
                    events[name].append(recorded / spent)
        for name, mine in rates.items():
            to_loop = statistics.median(a / b for a, b in zip(mine, rates[LOOP], strict=True))
            recorded_rate = None if name == LOOP else statistics.median(events[name])
            figures.append(SimulatorFigure(name, count, statistics.median(mine), to_loop, recorded_rate))
    return figures


def _loop(engine: NumpyEngine, replicas: int) -> Callable[[], tuple[int, int]]:
    """A loop that computes a gradient and a plain SGD step for one replica after the other."""
    params = np.tile(engine.initial(), (replicas, 1))
    out = np.empty_like(params)
    indices = np.random.default_rng(1).integers(0, engine.train_size, (replicas, BATCH))

    def run() -> tuple[int, int]:
        for rank in range(replicas):
            one = slice(rank, rank + 1)
            engine.gradients(params[one], indices[one], out[one], range(rank, rank + 1), [0])
            params[rank] -= 1e-6 * out[rank]
        return replicas, 0

    return run


def _simulated(engine: NumpyEngine, text: str, replicas: int) -> Callable[[], tuple[int, int]]:
    """A whole simulation, including the events of its record."""
    strategy = Strategy.parse(text)
    parts = np.array_split(np.arange(engine.train_size), replicas)
    cluster, result = Cluster(replicas, strategy.servers), choose_result(strategy, None)
    plan = Plan(strategy, cluster, engine.optimizer, parts, BATCH, STEPS, 0, result, STEPS)
    compute, network = ComputeModel.parse("lognormal(0.05)"), Network.parse("10gbit")

    def run() -> tuple[int, int]:
        events: list[object] = []
        Simulation(engine, plan, compute, network, events.append).run()
        return replicas * STEPS, len(events)

    return run
