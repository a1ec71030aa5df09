"""Final test errors of training on the digits, and medians and ranges over seeds, for the rows of claims."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from flockstep.errors import Diverged
from flockstep.testing.strategies import run_strategy
from flockstep.workloads.sampler import steps_for
from flockstep_lab.claims.base import Say
from flockstep_lab.claims.digits_perceptron import digits_job

SAMPLES = 1437
"""Number of training samples in the workload `digits`."""
GUESSING = 90.0
"""Test error, in percent, that is assigned to a model that diverged: the error of guessing among ten digits."""


@dataclass(frozen=True)
class Training:
    """Settings of training on the digits in virtual time; messages take no time."""

    workers: int
    optimizer: str
    batch: int
    epochs: float
    compute: str = "normal(1, cv=0.1)"
    schedule: str | None = None


def errors_of(strategy: str, how: Training, seeds: int, say: Say) -> list[float]:
    """Train once per seed, and return the final test errors in percent."""
    errors = [error_of(strategy, how, seed) for seed in range(seeds)]
    said = [strategy, f"{how.workers} workers", how.optimizer, *filter(None, [how.schedule])]
    say(f"{', '.join(said)}: " + " ".join(f"{error:.1f}" for error in errors))
    return errors


def error_of(strategy: str, how: Training, seed: int) -> float:
    """Train with one seed, and return the final test error in percent."""
    steps, job = steps_for(how.epochs, SAMPLES, how.workers, how.batch), digits_job(how.optimizer, how.batch)
    law, schedule = how.compute, how.schedule
    try:
        run = run_strategy(
            strategy, how.workers, steps, job=job, compute=law, network="ideal", seed=seed, schedule=schedule
        )
    except Diverged:
        return GUESSING
    return 100 * (1 - run.evaluation.metric)


def median(values: Iterable[float]) -> float:
    """Return the median of a sequence of numbers."""
    return float(np.median(list(values)))


def ranged(values: Iterable[float], digits: int = 2) -> str:
    """Return the median, the smallest and the largest of the values as a text, such as "2.50 (2.22 to 3.06)"."""
    known = list(values)
    return f"{median(known):.{digits}f} ({min(known):.{digits}f} to {max(known):.{digits}f})"
