"""Worker-steps per second in virtual time, beside a plain loop over the same gradients and the bare batched call.

The MLP of the workload `tabular` (9,871 parameters), batch 8 per worker, one thread, lognormal compute times,
10 Gbit/s links. The plain loop computes the same gradients one after the other: each replica has a torch model and an
optimiser of its own, and every gradient is followed by the optimiser's step. That is what training n replicas on one
machine costs without a simulator. Both baselines and every strategy take turns, round after round. Peak memory is that
of a fresh process for each number of replicas, the loop's models included.

    python benchmarks/simulator.py [--replicas 64,256,1024] [--rounds 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from flockstep.drivers.plan import Plan
from flockstep.drivers.virtual import Simulation
from flockstep.frameworks.torch import TorchEngine
from flockstep.nodes import Cluster
from flockstep.optimizers.sgd import SGD
from flockstep.simulation.compute import ComputeModel
from flockstep.simulation.network import Network
from flockstep.strategies.base import Strategy, choose_result
from flockstep.workloads.tabular import Tabular

STRATEGIES = ("local_sgd(collective=recursive_doubling)", "easgd", "gossip", "asgd", "bsp", "dpsgd")
BATCH = 8
JOB = Tabular(batch=BATCH, optimizer=SGD(lr=1e-6)).job(0)  # so low that a thousand asynchronous workers stay stable
STEPS = 50
"""Steps of each worker in a simulation."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--replicas", default="64,256,1024")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = [in_a_process_of_its_own(n, options.rounds) for n in options.replicas.split(",")]
    if options.json:
        print(json.dumps(results))
        return
    for result in results:
        print(
            f"{result['replicas']} replicas of {result['parameters']} parameters; "
            f"peak memory {result['peak_mb']:.0f} MB\n  plain loop {result['loop']:8.0f} gradients/s   "
            f"bare batched call {result['bare']:8.0f} gradients/s"
        )
        for name, row in result["strategies"].items():
            print(
                f"  {name:42} {row['rate']:8.0f} worker-steps/s   "
                f"{row['to_loop']:5.2f} x loop   {row['to_bare']:5.2f} x bare"
            )
    print("medians over rounds; ratios are medians of the rounds' own")


def in_a_process_of_its_own(replicas: str, rounds: int) -> dict[str, object]:
    """Measure in a fresh process, so that its peak memory is its own."""
    command = [sys.executable, __file__, "--measure", replicas, str(rounds)]
    answer: dict[str, object] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return answer


def measure(replicas: int, rounds: int) -> dict[str, object]:
    """All ways, in turn."""
    torch.set_num_threads(1)
    engine = TorchEngine(JOB, 0)
    ways: dict[str, Callable[[], int]] = {"loop": plain_loop(replicas), "bare": bare(engine, replicas)}
    for text in STRATEGIES:
        ways[text] = simulated(engine, text, replicas)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            count = way()
            if number:  # the first round warms up
                rates[name].append(count / (time.perf_counter() - start))
    return {
        "replicas": replicas,
        "parameters": engine.schema.size,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "loop": statistics.median(rates["loop"]),
        "bare": statistics.median(rates["bare"]),
        "strategies": {
            text: {
                "rate": statistics.median(rates[text]),
                "to_loop": median_ratio(rates[text], rates["loop"]),
                "to_bare": median_ratio(rates[text], rates["bare"]),
            }
            for text in STRATEGIES
        },
    }


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def plain_loop(replicas: int) -> Callable[[], int]:
    """Forward, backward, step for one replica after the other, each with a model and an optimiser of its own."""
    models = [JOB.model() for _ in range(replicas)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-6) for model in models]
    data = JOB.data()
    x, y = torch.as_tensor(data.train_x), torch.as_tensor(data.train_y)
    assert JOB.loss is not None
    loss_fn = JOB.loss
    indices = torch.as_tensor(np.random.default_rng(1).integers(0, len(x), (replicas, BATCH)))

    def run() -> int:
        for row, model, optimizer in zip(indices, models, optimizers, strict=True):
            loss_fn(model(x[row]), y[row]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return replicas

    return run


def bare(engine: TorchEngine, replicas: int) -> Callable[[], int]:
    """The batched gradient call alone, for all replicas at once."""
    params = np.tile(engine.initial(), (replicas, 1))
    out = np.empty_like(params)
    indices = np.random.default_rng(1).integers(0, engine.train_size, (replicas, BATCH))
    calls = max(1, 512 // replicas)

    def run() -> int:
        for _ in range(calls):
            engine.gradients(params, indices, out, range(replicas), [0] * replicas)
        return calls * replicas

    return run


def simulated(engine: TorchEngine, text: str, replicas: int) -> Callable[[], int]:
    """A whole simulation, its record's events included; evaluations only at the beginning and the end."""
    strategy = Strategy.parse(text)
    parts = np.array_split(np.arange(engine.train_size), replicas)
    plan = Plan(
        strategy, Cluster(replicas, strategy.servers), engine.optimizer, parts, BATCH, STEPS, 0,
        choose_result(strategy, None), STEPS,
    )  # fmt: skip
    compute, network = ComputeModel.parse("lognormal(0.05)"), Network.parse("10gbit")

    def run() -> int:
        events: list[object] = []
        Simulation(engine, plan, compute, network, events.append).run()
        return replicas * STEPS

    return run


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(int(sys.argv[2]), int(sys.argv[3]))))
    else:
        main()
