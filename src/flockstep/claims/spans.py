"""Medians and ranges over seeds, for the rows of claims, and the test error that a run ends with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from flockstep.claims.base import Say
from flockstep.claims.digits_perceptron import digits_job
from flockstep.errors import Diverged
from flockstep.testing.strategies import run_strategy
from flockstep.workloads.sampler import steps_for

SAMPLES = 1437
"""Training samples of the digits."""
GUESSING = 90.0
"""Error in per cent of a model that diverged until nothing could be computed any more."""


@dataclass(frozen=True)
class Training:
    """How the digits are trained in virtual time, with messages that take no time."""

    workers: int
    optimizer: str
    batch: int
    epochs: float
    compute: str = "normal(1, cv=0.1)"
    schedule: str | None = None


def errors_of(strategy: str, how: Training, seeds: int, say: Say) -> list[float]:
    """Test errors in per cent, one a seed."""
    errors = [error_of(strategy, how, seed) for seed in range(seeds)]
    said = [strategy, f"{how.workers} workers", how.optimizer, *filter(None, [how.schedule])]
    say(f"{', '.join(said)}: " + " ".join(f"{error:.1f}" for error in errors))
    return errors


def error_of(strategy: str, how: Training, seed: int) -> float:
    """Test error in per cent."""
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
    """Their median."""
    return float(np.median(list(values)))


def ranged(values: Iterable[float], digits: int = 2) -> str:
    """Median and range, for a row."""
    known = list(values)
    return f"{median(known):.{digits}f} ({min(known):.{digits}f} to {max(known):.{digits}f})"
