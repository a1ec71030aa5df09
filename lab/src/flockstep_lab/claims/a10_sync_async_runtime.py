"""Claim: a formula tells how much longer an update of synchronous SGD takes than one of asynchronous SGD."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep_lab.claims.base import Claim, Say, Verdict, near
from flockstep_lab.claims.update_trace import harmonic, timed

STEPS = {2: 20_000, 4: 12_000, 8: 8_000, 16: 5_000, 32: 3_000}
"""Number of workers → number of steps, enough for standard errors of at most 0.6 % of a synchronous step and 0.5 % of
an asynchronous update.
"""
LAW = "exponential(1)"
K = 4
"""K, the number of gradients in one update, of the methods K-sync, K-batch-sync and K-batch-async with 8 workers."""


@dataclass(frozen=True)
class SyncAsyncRuntime(Claim):
    """Claim: time per update of synchronous SGD, of asynchronous SGD, and of methods that wait for K gradients."""

    statement = (
        "With exponential gradient times an update of synchronous SGD takes P H_P times as long as an update of "
        "asynchronous SGD, with H_P = 1 + 1/2 + ... + 1/P; in mean gradient times, an update of K-sync takes H_P - "
        "H_(P-K), an update of K-batch-sync or K-batch-async K/P"
    )
    source = "Dutta, Joshi, Ghosh, Dube & Nagpurkar 2018 (runtime analysis, exponential times)"
    setting = (
        "parameter server, 2 to 32 workers, virtual time, the same random gradient times for all methods, messages "
        "that take no time"
    )
    tolerance = "+-1 % each"

    def check(self, say: Say) -> Verdict:
        """Compare synchronous with asynchronous SGD for each number of workers, then time the methods that wait for K
        gradients.
        """
        rows = []
        for workers, steps in STEPS.items():
            sync = seconds_per_update("ps(bsp)", workers, steps, workers)
            one = seconds_per_update("ps(asynchronous)", workers, steps, 1)
            rows += [
                near(f"P={workers}: seconds per synchronous step", harmonic(workers), sync, 0.01),
                near(f"P={workers}: seconds per asynchronous update", 1 / workers, one, 0.01),
                near(
                    f"P={workers}: ratio of synchronous to asynchronous seconds per update",
                    workers * harmonic(workers),
                    sync / one,
                    0.01,
                ),
            ]
            say(f"{workers} workers: {sync / one:.2f}")
        workers = 8
        for rule, expected, steps in (
            ("k_sync", harmonic(workers) - harmonic(workers - K), 4000),
            ("k_batch_sync", K / workers, 10_000),
            ("k_batch_async", K / workers, 10_000),
        ):
            found = seconds_per_update(f"ps(consistency={rule}({K}))", workers, steps, K)
            rows.append(near(f"P={workers}: seconds per update of {rule}({K})", expected, found, 0.01))
            say(f"{rows[-1].what}: {found:.4f}")
        return Verdict(tuple(rows))


def seconds_per_update(strategy: str, workers: int, steps: int, gradients: int) -> float:
    """Return the mean virtual seconds per update, if an update is made of `gradients` gradients.

    The last tenth of the run, in which some workers have finished, is left out.
    """
    t = timed(strategy, workers, steps, LAW)[0].t
    updates = 9 * len(t) // (10 * gradients)
    return float(t[updates * gradients - 1] / updates)
