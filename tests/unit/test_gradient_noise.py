"""The noise scale of a job's gradients, against one that is known."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.numpy import NumpyEngine, QuadraticModel
from flockstep.planning.job_profile import NOISE, JobProfile, gradient_noise, task_of

ELEMENTS, SPREAD = 900, 4.0


def job(lr: float, batch: int = 4) -> Job:
    """Gradients w - x, with x of mean 1 and standard deviation `SPREAD`: at w = 0 the noise scale is SPREAD² / B."""
    x = 1 + SPREAD * np.random.default_rng(3).normal(size=(2000, ELEMENTS))
    return Job(
        model=lambda: QuadraticModel(np.ones(ELEMENTS), np.zeros(ELEMENTS), "float64"),
        data=lambda: Data(x, np.zeros(len(x)), x[:2], np.zeros(2)),
        optimizer=f"sgd(lr={lr})",
        metric=lambda outputs, targets: 0.0,
        batch=batch,
        name="known noise",
    )


@pytest.mark.parametrize("batch", [2, 8])
def test_noise_scale_is_the_known_one(batch: int) -> None:
    assert gradient_noise(NumpyEngine(job(1e-6), 0), batch) == pytest.approx(SPREAD**2 / batch, rel=0.2)


def test_noise_scale_grows_as_training_shrinks_the_mean_gradient() -> None:
    """After 64 to 128 steps of lr = 0.005 the mean gradient is 0.62 times what it was, with the same noise."""
    still, moving = (task_of("", imported=job(lr)).noise for lr in (1e-6, 0.005))
    end = still * 0.62**-2
    assert 1 + moving == pytest.approx(2 / (1 / (1 + still) + 1 / (1 + end)), rel=0.1)


def test_noise_that_cannot_be_measured_is_assumed() -> None:
    assert JobProfile("sizes", 1000).noise == NOISE
    assert task_of("", imported=job(1e300)).noise == NOISE
    assert task_of("", 10**6, imported=job(1e-6)).noise == NOISE  # would take too long
