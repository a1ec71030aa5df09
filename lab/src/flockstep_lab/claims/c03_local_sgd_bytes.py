"""Claim: averaging every H steps sends H times fewer bytes only up to some H, beyond which more steps are needed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from flockstep.frameworks.base import Data, Job
from flockstep.records.events import EvaluationEvent
from flockstep.testing.strategies import run_strategy
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict, bounded
from flockstep_lab.claims.digits_perceptron import digits_job

WORKERS = 8
PERIODS = (1, 2, 4, 8, 16, 32, 64)
STEPS = 256
EVERY = 8
TARGET = 0.88
OPTIMIZER, BATCH = "sgd(lr=0.05)", 8
MOST = 1.2
"""Largest allowed ratio of the steps to the target with H local steps to the steps to the target with H = 1."""


@dataclass(frozen=True)
class LocalSgdBytes(Claim):
    """Claim: up to some number H of local steps, local SGD sends H times fewer bytes until it reaches a target
    accuracy.
    """

    statement = (
        "If workers average only every H steps, the bytes sent until a target error is reached fall by a factor of "
        "H, up to the H beyond which more steps are needed; that H is smaller if the data differ between workers"
    )
    source = "Stich 2019, sections 1 and 3; McMahan et al. 2017, section 3, for data that differ between workers"
    setting = (
        f"digits on a perceptron, {OPTIMIZER}, batches of {BATCH}, {WORKERS} workers in virtual time, H = 1 to 64; "
        f"samples assigned to workers at random, or sorted by label; target accuracy {TARGET} within {STEPS} steps; "
        "median of 5 seeds"
    )
    tolerance = (
        "H_max is the largest H that needs at most 20 % more steps to the target. For H up to H_max, a power law "
        "fitted to the bytes as a function of H has the exponent -1 ± 0.15; H_max is smaller if samples are sorted by "
        "label"
    )
    seeds: int = 5

    def check(self, say: Say) -> Verdict:
        """Measure the bytes sent until the target is reached, for every H, with samples at random and sorted by
        label.
        """
        rows: list[ClaimRow] = []
        figures: dict[str, float] = {}
        largest: dict[str, int] = {}
        for by_label in (False, True):
            data = "sorted by label" if by_label else "at random"
            found = self._sweep(by_label)
            say(f"{data}: " + ", ".join(f"H = {period}: {steps:g} steps" for period, (steps, _) in found.items()))
            figures |= {
                f"steps to the target, samples {data}, H = {period}": steps for period, (steps, _) in found.items()
            }
            grown = [period for period in found if found[period][0] > MOST * found[1][0]]
            fine = [period for period in found if period < min(grown, default=PERIODS[-1] + 1)]
            largest[data] = fine[-1]
            exponent = float(np.polyfit(np.log(fine), np.log([found[period][1] for period in fine]), 1)[0])
            what = f"exponent of a power law of the bytes to the target over H = 1 to {fine[-1]}, samples {data}"
            rows.append(ClaimRow(what, -1.0, exponent, abs(exponent + 1) <= 0.15))
        few, many = largest["sorted by label"], largest["at random"]
        rows.append(
            bounded("largest H that increases the steps by at most 20 %, samples sorted by label", f"< {many}", few)
        )
        note = (
            f"with samples at random, H = {PERIODS[-1]} is the largest H that was tried" if many == PERIODS[-1] else ""
        )
        return Verdict(tuple(rows), note, figures)

    def _sweep(self, by_label: bool) -> dict[int, tuple[float, float]]:
        """H → median steps, and median bytes per worker, to the target; up to the first H that misses the target."""
        found: dict[int, tuple[float, float]] = {}
        for period in PERIODS:
            steps, sent = np.median([to_target(period, by_label, seed) for seed in range(self.seeds)], axis=0)
            found[period] = float(steps), float(sent)
            if steps == np.inf:
                break
        return found


def to_target(period: int, by_label: bool, seed: int) -> tuple[float, float]:
    """Return the number of steps until the mean model reaches the target accuracy, and the bytes sent until then.

    Both are infinite if the target is not reached.
    """
    job = digits_job(OPTIMIZER, BATCH)
    job, strategy = sorted_by_label(job) if by_label else job, f"local_sgd({period}, recursive_doubling)"
    run = run_strategy(
        strategy, WORKERS, STEPS, job=job, compute="constant(1)", network="ideal", seed=seed, evaluate_every=EVERY
    )
    good = [snapshot.step for snapshot in run.of(EvaluationEvent) if snapshot.metric >= TARGET]
    if not good:
        return float("inf"), float("inf")
    sent = {snapshot.step: snapshot.sent_bytes for snapshot in run.of(EvaluationEvent)}
    return good[0], sent[-(-good[0] // max(period, EVERY)) * max(period, EVERY)]


def sorted_by_label(job: Job) -> Job:
    """Return the job with its training samples sorted by label, so that each worker's part has few classes."""

    def data() -> Data:
        its = job.data()
        order = np.argsort(its.train_y, kind="stable")
        return Data(its.train_x[order], its.train_y[order], its.test_x, its.test_y)

    return replace(job, data=data)
