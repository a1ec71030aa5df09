"""Claim: with more workers, the largest stable learning rate rises for synchronous SGD, and falls for asynchronous
SGD.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.frameworks.numpy import Views
from flockstep.testing.strategies import run_strategy
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict
from flockstep_lab.claims.update_trace import Unjudged, unjudged_job

WORKERS = (1, 2, 4, 8, 16, 32)
COMPUTE = "normal(0.01, cv=0.1)"
LOCAL_STEPS = 50
SAMPLES = 2**18
"""Number of samples times number of features, large enough that each worker's part of the data has nearly the same
curvature.
"""
GONE = 1e9
"""Distance from the optimum beyond which a diverged model is no longer updated; every model starts at distance 1."""


@dataclass(frozen=True)
class Regime:
    """A least-squares problem with Gaussian inputs, and the learning rates that are tried."""

    features: int
    batch: int
    rates: FlatArray
    updates: Callable[[str, int], int]
    """Function from (method, number of workers) to the number of steps of each worker."""


NOISE = Regime(64, 1, 2.0 ** np.arange(-7, 1.01, 0.25), lambda method, n: 300 if method == "local" else 100 + 500 // n)
"""Problem with noisy gradients of one sample each: one worker is stable in mean square up to a learning rate of 2 / (2
+ features).
"""
CURVATURE = Regime(8, 64, 2.0 ** np.arange(-6, 4.01, 0.25), lambda method, n: 60 + 100 // n)
"""Problem with almost exact gradients and curvature 1: gradient descent is stable below a learning rate of 2."""

METHODS = {
    "sync": "ps(bsp)",
    "async": "ps(asynchronous)",
    "scaled": "ps(asynchronous, server_update=staleness_scaled)",
    "local": f"local_sgd({LOCAL_STEPS})",
}


class LeastSquaresModels(Unjudged):
    """Independent least-squares models on the same samples, each with its own learning rate.

    The gradient includes the learning rate, so that one run tries all learning rates.
    """

    def __init__(self, regime: Regime):
        self.rates, self.features = regime.rates, regime.features

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of the parameters: (number of learning rates, number of features)."""
        return {"w": (len(self.rates), self.features)}

    def initial(self, random: np.random.Generator) -> Views:
        """Return the initial parameters, all at distance 1 from the optimum 0."""
        return {"w": np.full(self.shapes["w"], self.features**-0.5)}

    def gradients(self, params: Views, x: FlatArray, y: FlatArray, out: Views) -> FlatArray:
        """Write the gradients to `out`: the mean over the samples x of x (x · w), times each model's learning rate.

        The returned losses are zeros.
        """
        w = params["w"]
        slopes = (w @ x.transpose(0, 2, 1)) @ x
        slopes *= self.rates[:, None] / x.shape[1]
        slopes[np.abs(w).max(axis=2) > GONE] = 0
        out["w"][...] = slopes
        return np.zeros(len(x))


@dataclass(frozen=True)
class LargestLearningRate(Claim):
    """Claim: how the largest stable learning rate of each method depends on the number of workers."""

    statement = (
        "With more workers the largest stable learning rate of synchronous SGD grows about linearly, that of "
        "asynchronous SGD falls like 1 / staleness, and that of local SGD does not change"
    )
    source = "Langer, He, Rahayu & Xue 2020, table 2, column OptLR; Zhang et al. 2016 for the scaled rate"
    setting = (
        "least squares with Gaussian inputs in virtual time, 1 to 32 workers, normal gradient times (coefficient of "
        "variation 0.1), messages that take no time; all learning rates in one run; median of 5 seeds"
    )
    tolerance = (
        "exponent of the power law in the number of workers, within 0.25: 1 for synchronous SGD, -1 for asynchronous "
        "SGD, 0 for local SGD and for asynchronous SGD scaled by 1 / staleness; the rate of asynchronous SGD also "
        "within a factor of 2^(1/2) (two steps of the grid) of 2 sin(pi / (4 tau + 2)) / curvature, the largest "
        "stable rate under a constant delay tau"
    )
    seeds: int = 5

    def check(self, say: Say) -> Verdict:
        """Measure the largest stable learning rate of every method for each number of workers, and fit a power law."""
        noise = {method: self._sweep(NOISE, method, say) for method in ("sync", "local", "async")}
        curvature = {method: self._sweep(CURVATURE, method, say) for method in METHODS}
        late = tuple(n for n in WORKERS if n >= 4)
        rows = (
            _row("synchronous SGD, noisy gradients, 1 to 32 workers", 1.0, noise["sync"], WORKERS),
            _row(f"local SGD of {LOCAL_STEPS} steps, noisy gradients, 1 to 32 workers", 0.0, noise["local"], WORKERS),
            _row("asynchronous SGD, exact gradients, 4 to 32 workers", -1.0, curvature["async"], late),
            _row(
                "asynchronous SGD scaled by 1 / staleness, exact gradients, 4 to 32 workers",
                0.0,
                curvature["scaled"],
                late,
            ),
            _row("local SGD, exact gradients, 1 to 32 workers", 0.0, curvature["local"], WORKERS),
        )
        reason = (
            "Two problems are used, because no single problem shows both effects up to 32 workers. The largest "
            "learning rate of synchronous SGD grows with the number of workers while noise limits it, up to 2 / "
            "curvature; that of asynchronous SGD falls once staleness limits it, to about pi / (2 · staleness · "
            "curvature)"
        )
        figures = {
            f"{regime}, {method}, {n} workers": rate
            for regime, table in (("noisy", noise), ("exact", curvature))
            for method, rates in table.items()
            for n, rate in rates.items()
        }
        return Verdict((*rows, _closed_form(curvature["async"])), reason, figures)

    def _sweep(self, regime: Regime, method: str, say: Say) -> dict[int, float]:
        """Number of workers → largest stable rate, median over the seeds."""
        found = {n: float(np.median([largest(regime, method, n, s) for s in range(self.seeds)])) for n in WORKERS}
        say(f"{method}, batch {regime.batch}: " + ", ".join(f"{n}: {rate:.3g}" for n, rate in found.items()))
        return found


def largest(regime: Regime, method: str, workers: int, seed: int) -> float:
    """Return the largest stable learning rate on the grid: at the next larger rate, the model ends farther from the
    optimum than it started.
    """
    x = np.random.default_rng(seed).standard_normal((SAMPLES // regime.features, regime.features))
    job = unjudged_job(lambda: LeastSquaresModels(regime), x, regime.batch)
    steps = regime.updates(method, workers)
    steps += -steps % LOCAL_STEPS if method == "local" else 0
    run = run_strategy(METHODS[method], workers, steps, job=job, compute=COMPUTE, network="ideal", seed=seed)
    distance = np.linalg.norm(run.result.reshape(len(regime.rates), -1), axis=1)
    stable = int(np.argmax(np.append(~(distance < 1), True)))
    return float(regime.rates[max(stable - 1, 0)])


def _row(what: str, expected: float, rates: dict[int, float], workers: tuple[int, ...]) -> ClaimRow:
    x, y = np.log(workers), np.log([rates[n] for n in workers])
    exponent = float(np.polyfit(x, y, 1)[0])
    return ClaimRow(
        f"exponent of the largest stable rate over the workers: {what}",
        expected,
        exponent,
        abs(exponent - expected) <= 0.25,
    )


def _closed_form(rates: dict[int, float]) -> ClaimRow:
    """Row that compares with the closed form for the delay τ = n - 1, which all gradients have if workers are equally
    fast.
    """
    ratios = [rates[n] / (2 * np.sin(np.pi / (4 * n - 2))) for n in WORKERS]
    worst = float(max(ratios, key=lambda ratio: abs(np.log(ratio))))
    what = "asynchronous SGD, exact gradients: largest stable rate / closed form, the ratio farthest from 1"
    return ClaimRow(what, 1.0, worst, bool(abs(np.log2(worst)) <= 0.5))
