"""How far a strategy parts two runs whose gradients differ by rounding: relative to the rounding, step by step.

Usage: python benchmarks/amplification.py [STRATEGY …]
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import nn

from flockstep import Data, Job
from flockstep.frameworks.job import make_engine
from flockstep.nodes import Cluster
from flockstep.runtime.plan import Plan
from flockstep.runtime.virtual import Simulation
from flockstep.simulation.compute import ConstantTime
from flockstep.simulation.network import Ideal
from flockstep.strategies.base import Strategy, choose_result
from flockstep.workloads.split import Split

NUDGE = 1e-13
STEPS = (5, 10, 20)
WORKERS = 2


class Tables(nn.Module):
    """Two embedding tables and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(200, 16), nn.Embedding(50, 16)
        self.hidden, self.out = nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores of pairs of indices, (batch, 2)."""
        both = torch.cat([self.a(x[:, 0]), self.b(x[:, 1])], 1)
        outputs: torch.Tensor = self.out(torch.tanh(self.hidden(both)))
        return outputs


def data() -> Data:
    random = torch.Generator().manual_seed(0)
    x = torch.stack([torch.randint(0, size, (1200,), generator=random) for size in (200, 50)], 1)
    y = (x[:, 0] * 7 + x[:, 1] * 3) % 4
    return Data(x[:1000], y[:1000], x[1000:], y[1000:])


def ended(text: str, steps: int, nudge: float) -> np.ndarray:
    """The final parameters, in float64, where every gradient is off by `nudge` relative to itself."""
    job = Job(lambda: Tables().double(), data, "sgd(lr=0.1)", loss=nn.functional.cross_entropy, batch=16)
    engine, strategy = make_engine(job, 0), Strategy.parse(text)
    engine.batching, plain = "one by one: as real processes do", engine.gradient

    def gradient(params, indices, out, *more):
        loss = plain(params, indices, out, *more)
        out *= 1 + nudge * np.random.default_rng(len(out)).uniform(-1, 1, len(out))
        return loss

    engine.gradient = gradient
    parts = Split.parse("iid").assign(engine.labels, engine.train_size, WORKERS, 0)
    cluster = Cluster(WORKERS, strategy.servers_for(WORKERS))
    policy = choose_result(strategy, None)
    plan = Plan(strategy, cluster, engine.optimizer, parts, job.batch, steps, 0, policy, steps)
    run = Simulation(engine, plan, ConstantTime(0.01), Ideal(), lambda event: None)
    run.run()
    return np.asarray(run.tracker.result)


def main() -> None:
    for text in sys.argv[1:] or ("all_reduce", "powersgd", "powersgd(4)", "powersgd(feedback=none)"):
        for steps in STEPS:
            one, other = ended(text, steps, 0.0), ended(text, steps, NUDGE)
            factor = np.abs(one - other).max() / np.abs(one).max() / NUDGE
            print(f"{text} after {steps} steps: {factor:.2g} times", flush=True)


if __name__ == "__main__":
    main()
