"""In expectation, asynchrony acts like momentum."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.claims.base import Claim, ClaimRow, Say, Verdict, near
from flockstep.claims.update_trace import Unjudged, Updates, unjudged_job
from flockstep.frameworks.numpy import Views
from flockstep.messages import Address, Message
from flockstep.testing.strategies import run_strategy

RATES = {2: 0.5, 4: 0.3, 8: 0.2, 16: 0.1}
"""Number of workers → product of the learning rate and the curvature of the quadratics."""
WINDOW = 60
COPIES = 512


class PerturbedQuadratics(Unjudged):
    """Many independent one-dimensional quadratics at rest at 0; each sample pushes one of them up by 1.

    The gradient is affine, so the return of a copy after a push equals a run that starts at distance 1, and one
    simulation replaces as many runs as it has gradients. The learning rate is part of the gradient.
    """

    def __init__(self, rate: float):
        self.rate = rate

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the model: one scalar parameter for each copy of the quadratic problem."""
        return {"w": (COPIES,)}

    def initial(self, random: np.random.Generator) -> Views:
        """Return zeros, because all copies are at rest."""
        return {"w": np.zeros(COPIES)}

    def gradients(self, params: Views, x: FlatArray, y: FlatArray, out: Views) -> FlatArray:
        """Compute the gradient: rate · w, minus 1 where the sample pushes."""
        np.multiply(params["w"], self.rate, out=out["w"])
        out["w"][np.arange(len(x)), x[:, 0, 0].astype(np.int64)] -= 1
        return np.zeros(len(x))


class Responses(Updates):
    """Records how the server's value of each copy develops in the updates after a push: sums over all copies, 0, 1, 2,
    … updates later.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sums, self.counts = np.zeros(WINDOW + 1), np.zeros(WINDOW + 1)
        self.pushed: deque[int] = deque(maxlen=WINDOW + 1)
        self.since = np.full(COPIES, -WINDOW - 1)
        self.version = 0

    def send(self, to: Address, message: Message) -> None:
        """Read from a gradient which copy it pushes, and from a reply the current values of the copies
        pushed before.
        """
        if message.tag == "push" and message.source >= 0:
            self.version += 1
            copy = int(np.argmin(message.payload))
            self.pushed.appendleft(copy)
            self.since[copy] = self.version
        elif message.tag == "push":
            copies = np.array(self.pushed)
            ages = np.arange(len(copies))
            valid = self.since[copies] == self.version - ages  # the copy was not pushed again meanwhile
            self.sums[ages[valid]] += np.asarray(message.payload)[copies[valid]]
            self.counts[ages[valid]] += 1
        super().send(to, message)

    @property
    def mean(self) -> FlatArray:
        """Mean over all copies of w_t, t = 0 to 60 updates after a push."""
        mean: FlatArray = self.sums / self.counts
        return mean


@dataclass(frozen=True)
class AsynchronyBegetsMomentum(Claim):
    """Claim: asynchronous SGD behaves like SGD with momentum."""

    seeds: int = 5
    responses: int = 30_000
    """Number of workers and seed → the recorded responses."""
    statement = (
        "With M memoryless workers asynchronous SGD moves in expectation as SGD with momentum 1 - 1/M and with the "
        "learning rate divided by M: E[w_(t+1) - w_t] = (1 - 1/M) E[w_t - w_(t-1)] - (rate / M) E f'(w_t)"
    )
    source = "Mitliagkas, Zhang, Hadjis & Re 2016 (momentum from asynchrony, memoryless workers)"
    setting = (
        "quadratic, exponential gradient times (the next worker to finish is uniformly distributed), M = 2, 4, 8, 16 "
        "workers, learning rate times curvature 0.5, 0.3, 0.2, 0.1, 60 updates, 150,000 overlapping runs for each M, "
        "5 seeds"
    )
    tolerance = "fitted to the mean over all runs: momentum within 0.003, learning rate within 2 %"

    def check(self, say: Say) -> Verdict:
        """Fit momentum and learning rate to the mean trajectory of each number of workers."""
        rows, figures = [], {}
        for workers, rate in RATES.items():
            means = np.array([self._mean(workers, rate, seed) for seed in range(self.seeds)])
            momentum, step = fitted(means.mean(axis=0))
            spread = np.std([fitted(mean) for mean in means], axis=0, ddof=1) / np.sqrt(self.seeds)
            implied, divided = 1 - 1 / workers, rate / workers
            rows += [
                ClaimRow(f"M={workers}: momentum", implied, momentum, abs(momentum - implied) <= 0.003),
                near(f"M={workers}: learning rate times curvature", divided, step, 0.02),
            ]
            figures[f"M={workers}: standard error of the momentum"] = float(spread[0])
            figures[f"M={workers}: standard error of the learning rate"] = float(spread[1])
            say(f"{workers} workers: momentum {momentum:.4f} +- {spread[0]:.4f}, rate {step:.4f} +- {spread[1]:.4f}")
        return Verdict(tuple(rows), figures=figures)

    def _mean(self, workers: int, rate: float, seed: int) -> FlatArray:
        job = unjudged_job(lambda: PerturbedQuadratics(rate), np.arange(COPIES, dtype=np.float64)[:, None])
        steps = self.responses // workers
        run = run_strategy(
            "ps(asynchronous)",
            workers,
            steps,
            job=job,
            compute="exponential(1)",
            network="ideal",
            seed=seed,
            simulation=Responses,
        )
        assert isinstance(run.simulation, Responses)
        return run.simulation.mean


def fitted(w: FlatArray) -> tuple[float, float]:
    """Momentum and learning rate, by least squares, with which each change of w follows from the previous change."""
    change = np.diff(w)
    solution = np.linalg.lstsq(np.stack([change[:-1], -w[1:-1]], axis=1), change[1:], rcond=None)[0]
    return float(solution[0]), float(solution[1])
