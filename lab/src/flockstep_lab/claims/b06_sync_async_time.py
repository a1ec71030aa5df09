"""Claim: if gradient times vary, asynchronous SGD reaches its target several times earlier than synchronous SGD."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from flockstep.frameworks.base import Data, Job
from flockstep.testing.strategies import run_strategy
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict
from flockstep_lab.claims.digits_perceptron import digits_job
from flockstep_lab.claims.spans import median, ranged

WORKERS, BATCH, LR, NOISE, TARGET = 8, 4, 0.06, 0.15, 0.90
METHODS = {"asynchronous": 250, "k_sync(4)": 420, "bsp": 420}
"""Consistency rule → number of gradients that each worker computes; larger than the number needed to reach the
target.
"""
CLOCKED, RANDOM = "constant(1)", "exponential(1)"


def noisy_job(seed: int) -> Job:
    """Return the job that classifies handwritten digits, with 15 % of the training labels replaced by random labels."""
    job = digits_job(f"sgd(lr={LR})", BATCH)

    def data() -> Data:
        its, random = job.data(), np.random.default_rng(seed)
        wrong = random.random(len(its.train_y)) < NOISE
        labels = np.where(wrong, random.integers(0, 10, len(its.train_y)), its.train_y)
        return Data(its.train_x, labels, its.test_x, its.test_y)

    return replace(job, data=data)


def seconds_to_target(rule: str, compute: str, seed: int) -> float:
    """Return the virtual seconds until the test error falls to 10 %; infinite if it never does."""
    how, steps, job = f"ps({rule})", METHODS[rule], noisy_job(seed)
    run = run_strategy(how, WORKERS, steps, job=job, compute=compute, network="ideal", seed=seed, evaluate_every=2)
    return run.seconds_to(TARGET)


@dataclass(frozen=True)
class SyncAsyncTime(Claim):
    """Claim: with exponential compute times, asynchronous SGD falls to a test error of 10 % sooner than synchronous
    SGD.
    """

    seeds: int = 5
    statement = (
        "With memoryless gradient times, asynchronous SGD reaches the target several times faster than synchronous "
        "SGD; a method that waits for the fastest half of the gradients falls in between; with equally fast workers, "
        "the advantage is smaller"
    )
    source = (
        "Dutta, Joshi, Ghosh, Dube & Nagpurkar 2018 (error over runtime). The figures are compared with a pilot run "
        "in plain numpy"
    )
    setting = (
        f"digits on a perceptron, {WORKERS} workers in virtual time, batches of {BATCH}, learning rate {LR}, 15 % "
        "random training labels, exponential gradient times of mean 1 s; time to a test error of 10 %; 5 seeds"
    )
    tolerance = (
        "median times to the target: synchronous / asynchronous >= 3 and at most 21.7, the ratio of their numbers "
        "of updates; the time of 4-sync lies between both"
    )

    def check(self, say: Say) -> Verdict:
        """Time synchronous, 4-sync and asynchronous SGD with exponential compute times, then synchronous and
        asynchronous SGD with constant compute times.
        """
        times = {rule: self._times(rule, RANDOM, say) for rule in METHODS}
        least, half, most = (median(taken) for taken in times.values())
        even = [median(self._times(rule, CLOCKED, say)) for rule in ("bsp", "asynchronous")]
        ratio, clocked = most / least, even[0] / even[1]
        rows = (
            ClaimRow(
                "asynchronous SGD: seconds to a test error of 10 %",
                "75 to 150",
                ranged(times["asynchronous"], 0),
                math.isfinite(least),
            ),
            ClaimRow("first 4 of 8 (4-sync)", "100 to 200", ranged(times["k_sync(4)"], 0), least < half < most),
            ClaimRow("synchronous", "400 to 700", ranged(times["bsp"], 0), math.isfinite(most)),
            ClaimRow("synchronous / asynchronous", "4 to 6; 3 to 21.7", round(ratio, 2), 3 <= ratio <= 21.7),
            ClaimRow(
                "control: time to the target of synchronous / asynchronous SGD, constant gradient times",
                "less",
                round(clocked, 2),
                clocked < ratio,
            ),
        )
        return Verdict(rows)

    def _times(self, rule: str, compute: str, say: Say) -> list[float]:
        taken = [seconds_to_target(rule, compute, seed) for seed in range(self.seeds)]
        say(f"{rule}, {compute}: " + " ".join(f"{seconds:.0f}" for seconds in taken))
        return taken
