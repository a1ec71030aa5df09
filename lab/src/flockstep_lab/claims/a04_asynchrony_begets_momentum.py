"""Claim: in expectation, asynchronous SGD without momentum moves as synchronous SGD with momentum does."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.frameworks.numpy import Views
from flockstep.messages import Address, Message
from flockstep.testing.strategies import run_strategy
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict, near
from flockstep_lab.claims.update_trace import Unjudged, Updates, unjudged_job

RATES = {2: 0.5, 4: 0.3, 8: 0.2, 16: 0.1}
"""Number of workers → product of the learning rate and the curvature of the quadratics."""
WINDOW = 60
COPIES = 512


class PerturbedQuadratics(Unjudged):
    """Many independent one-dimensional quadratics, whose parameters begin at the optimum 0; each sample pushes one of
    them up by 1.

    The gradient is affine, so the return to 0 after a push equals a run that starts at distance 1 from the optimum. One
    simulation replaces as many runs as it has gradients. The gradient already includes the learning rate.
    """

    def __init__(self, rate: float):
        self.rate = rate

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of the parameters: one scalar for each of the `COPIES` quadratics."""
        return {"w": (COPIES,)}

    def initial(self, random: np.random.Generator) -> Views:
        """Return zeros: every quadratic begins at its optimum."""
        return {"w": np.zeros(COPIES)}

    def gradients(self, params: Views, x: FlatArray, y: FlatArray, out: Views) -> FlatArray:
        """Write rate · w to `out`, and subtract 1 at the quadratic that each sample pushes.

        The returned losses are zeros.
        """
        np.multiply(params["w"], self.rate, out=out["w"])
        out["w"][np.arange(len(x)), x[:, 0, 0].astype(np.int64)] -= 1
        return np.zeros(len(x))


class Responses(Updates):
    """A simulation that records how the server's value of each quadratic develops in the 60 updates after a push.

    The values are summed over all pushes, separately for 0, 1, 2, … updates after the push.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sums, self.counts = np.zeros(WINDOW + 1), np.zeros(WINDOW + 1)
        self.pushed: deque[int] = deque(maxlen=WINDOW + 1)
        self.since = np.full(COPIES, -WINDOW - 1)
        self.version = 0

    def send(self, to: Address, message: Message) -> None:
        """Send a message. Note which quadratic a worker's gradient belongs to; for a reply of the server, add up the
        current values of the quadratics whose gradients came earlier.
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
        """Mean value of a quadratic's parameter 0, 1, …, 60 updates after its push, of shape (61,)."""
        mean: FlatArray = self.sums / self.counts
        return mean


@dataclass(frozen=True)
class AsynchronyBegetsMomentum(Claim):
    """Claim: asynchronous SGD behaves like SGD with momentum."""

    seeds: int = 5
    responses: int = 30_000
    """Function from (number of workers, seed) to the mean value of a parameter 0, 1, …, 60 updates after a push."""
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
                near(
                    f"M={workers}: learning rate times curvature, fitted to asynchronous SGD with M workers",
                    divided,
                    step,
                    0.02,
                ),
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
    """Fit momentum and learning rate by least squares, so that each change of w follows from the previous
    change of w.
    """
    change = np.diff(w)
    solution = np.linalg.lstsq(np.stack([change[:-1], -w[1:-1]], axis=1), change[1:], rcond=None)[0]
    return float(solution[0]), float(solution[1])
