"""How many calls of flockstep's own functions lie on a gradient's way through it.

    python benchmarks/hops.py

In a script's own loop with one worker: calls from `optimizer.step()` to its return. In virtual time, a ring all-reduce
of four workers: calls of the whole run per worker and step, without those of the start.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

import numpy as np

import flockstep
from flockstep.arrays.schema import Schema
from flockstep.nodes import Cluster
from flockstep.optimizers.sgd import SGD
from flockstep.runtime.loop import Loop
from flockstep.runtime.plan import LocalOptimizer, Plan
from flockstep.runtime.virtual import Simulation
from flockstep.simulation.compute import ComputeModel
from flockstep.simulation.network import Network
from flockstep.strategies.base import Strategy
from flockstep.testing.strategies import GradientSource

OURS = str(Path(flockstep.__file__).parent)


def calls(action: Callable[[], object]) -> Counter[str]:
    """How often each of our functions was called meanwhile, by file, line and name."""
    counted: Counter[str] = Counter()

    def look(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OURS):
            counted[f"{Path(code.co_filename).relative_to(OURS)}:{code.co_firstlineno} {code.co_name}"] += 1

    sys.setprofile(look)
    try:
        action()
    finally:
        sys.setprofile(None)
    return counted


def own_loop(strategy: str) -> Counter[str]:
    """Calls of one step of a script's own loop in plain numpy, which no framework's own calls are part of."""
    params, gradients = np.ones(20, np.float32), np.zeros(20, np.float32)
    arguments = Schema.of({"w": (20,)}), Strategy.parse(strategy), LocalOptimizer(SGD(lr=0.1), params), SGD(lr=0.1)
    loop = Loop(params, gradients, *arguments)
    for _ in range(5):
        loop.step()
    found = calls(loop.step)
    loop.finish()
    return found


def virtual(strategy: str, workers: int, steps: int) -> Counter[str]:
    """Calls of a run in virtual time with so many steps, less those of one with half of them."""
    source, rule = GradientSource(workers), Strategy.parse(strategy)
    compute, network = ComputeModel.parse("exponential(0.05)"), Network.parse("1gbit")

    def run(count: int) -> None:
        cluster = Cluster(workers, rule.servers_for(workers))
        plan = Plan(rule, cluster, source.engine.optimizer, source.parts, 8, count, 0, "mean", steps)
        Simulation(source.engine, plan, compute, network, list[object]().append).run()

    long, short = calls(partial(run, steps)), calls(partial(run, steps // 2))
    return Counter({name: count - short[name] for name, count in long.items()})


def main() -> None:
    """Print the figures; with an argument, also the functions of that one."""
    steps, workers = 100, 4
    figures = {
        "own loop, all_reduce": (own_loop("all_reduce"), 1),
        "own loop, ps(bsp)": (own_loop("ps(consistency=bsp)"), 1),
        "virtual, ring": (virtual("all_reduce(collective=ring)", workers, steps), workers * steps // 2),
    }
    for name, (counted, per) in figures.items():
        print(f"{name:24} {counted.total() / per:7.1f} calls a step")
        if len(sys.argv) > 1 and sys.argv[1] in name:
            for where, count in counted.most_common():
                print(f"    {count / per:7.2f}  {where}")


if __name__ == "__main__":
    main()
