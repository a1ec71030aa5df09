"""Medians and ranges over seeds, for the rows of claims, and the test error that a run ends with."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from flockstep.claims.digits_perceptron import digits_job
from flockstep.errors import Diverged
from flockstep.testing.strategies import run_strategy
from flockstep.workloads.sampler import steps_for

SAMPLES = 1437
"""Training samples of the digits."""
GUESSING = 90.0
"""Error in per cent of a model that diverged until nothing could be computed any more."""


def error_of(strategy: str, workers: int, optimizer: str, batch: int, epochs: float, compute: str, seed: int) -> float:
    """Test error in per cent of the digits after so many epochs in virtual time, with messages that take no time."""
    steps = steps_for(epochs, SAMPLES, workers, batch)
    job = digits_job(optimizer, batch)
    try:
        run = run_strategy(strategy, workers, steps, job=job, compute=compute, network="ideal", seed=seed)
    except Diverged:
        return GUESSING
    evaluation = run.simulation.tracker.evaluation
    assert evaluation is not None
    return 100 * (1 - evaluation.metric)


def median(values: Iterable[float]) -> float:
    """Their median."""
    return float(np.median(list(values)))


def ranged(values: Iterable[float], digits: int = 2) -> str:
    """Median and range, for a row."""
    known = list(values)
    return f"{median(known):.{digits}f} ({min(known):.{digits}f} to {max(known):.{digits}f})"
