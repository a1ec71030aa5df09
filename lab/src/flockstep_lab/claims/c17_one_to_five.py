"""Claim: the number of local steps between two exchanges determines which share of the time SparkNet's workers
compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flockstep.testing.strategies import bowl_job, run_strategy
from flockstep_lab.claims.base import Claim, Say, Verdict, near

ONE_TO_FIVE = 5 / 6
"""Share of the time in which workers compute, if communication takes a fifth of the time of computing."""
GRADIENT = 0.01
"""Virtual seconds that a gradient takes, T_c in the formula."""
SIZE = 4000
"""Number of float64 parameters of the model."""
CLUSTERS = ((4, "link(bandwidth=2e6, latency=0.001)"), (8, "link(bandwidth=1e6, latency=0.001)"), (16, "100mbit"))
COLLECTIVES = ("ring", "recursive_doubling")
SWEEP = (1, 3, 10, 30)
ROUNDS = 2


@dataclass(frozen=True)
class OneToFive(Claim):
    """Claim: workers compute for 5/6 of the time if an exchange takes a fifth as long as the local steps between
    exchanges.
    """

    statement = (
        "With tau local steps per exchange, workers compute for a share tau T_c / (tau T_c + T_comm) of the time; "
        "if communication takes a fifth of the computing time, the share is 83.3 %"
    )
    source = "Moritz et al. 2016, section 3 (SparkNet); Langer et al. 2020, section 3.3.2"
    setting = (
        f"quadratic, K = {SIZE}, T_c = {1000 * GRADIENT:g} ms, virtual time: 4, 8 and 16 workers on links of different "
        "speed, ring and recursive doubling, tau from 1 to 30; T_comm measured with tau = 1"
    )
    tolerance = (
        "utilization (share of time spent computing) within 1 % of the formula for every tau, and within 1 % of 5/6 "
        "for the tau computed for 5/6"
    )
    quick = True

    def check(self, say: Say) -> Verdict:
        """For each cluster, measure the share of time spent computing for several τ, and for the τ that should give
        5/6. τ is the number of local steps between exchanges.
        """
        rows, figures = [], {}
        for workers, network in CLUSTERS:
            for collective in COLLECTIVES:
                where = f"{workers} workers, {network}, {collective}"
                say(where)
                busy = _utilization(workers, network, collective)
                waits = GRADIENT / busy(1) - GRADIENT
                figures[f"T_comm in ms, {where}"] = 1000 * waits
                worst = max(SWEEP, key=lambda tau: abs(busy(tau) - formula(tau, waits)))
                what = f"utilization at tau = {worst}, farthest from the formula, {where}"
                rows.append(near(what, formula(worst, waits), busy(worst), 0.01))
                solved = max(1, round(ONE_TO_FIVE / (1 - ONE_TO_FIVE) * waits / GRADIENT))
                what = f"utilization at tau = {solved}, where 5/6 is expected, {where}"
                rows.append(near(what, ONE_TO_FIVE, busy(solved), 0.01))
        note = (
            "workers exchange by a collective; SparkNet's central driver would only change T_comm in the same formula"
        )
        return Verdict(tuple(rows), note, figures)


def formula(period: int, communication: float) -> float:
    """Return the predicted share of time spent computing, τ T_c / (τ T_c + T_comm).

    `period`: τ local steps; `communication`: T_comm in seconds.
    """
    busy = period * GRADIENT
    return busy / (busy + communication)


def _utilization(workers: int, network: str, collective: str) -> Callable[[int], float]:
    """Function τ → share of time spent on gradients."""

    def busy(tau: int) -> float:
        steps, text = ROUNDS * tau, f"local_sgd({tau}, {collective})"
        job = bowl_job(dimension=SIZE)
        run = run_strategy(text, workers, steps, job=job, compute=f"constant({GRADIENT})", network=network)
        return steps * GRADIENT / run.seconds

    return busy
