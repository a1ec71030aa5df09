"""Measures the noise scale of a job's gradients by a short training of one worker."""

from __future__ import annotations

import numpy as np

from flockstep.frameworks.base import Engine
from flockstep.runtime.plan import LocalOptimizer

STEPS = 64
"""Number of steps of each of the three phases: a measurement at the initial parameters, training, and a measurement
during further training.
"""
GRADIENTS = 6 * STEPS
"""Number of gradients that one call of `gradient_noise` computes."""


def gradient_noise(engine: Engine, batch: int) -> float:
    """Return the noise scale of the job's gradients in batches (B_noise / B of McCandlish et al. 2018): the variance of
    a batch's gradient, relative to the squared norm of the gradient of all samples. The result is not finite if
    training diverges.

    For the gradients a and b of two batches at equal parameters, E|a - b|²/2 = tr Σ / B and E[a · b] = |G|². The noise
    scale r changes while a job trains. A step advances training by 1 / (1 + r) of a step without noise, so the number
    of steps to a target depends on the harmonic mean of 1 + r over those steps. The result is that of two
    measurements: before training, and between steps `STEPS` and 2 `STEPS`.
    """
    params, first, second = engine.initial(), engine.initial(), engine.initial()
    optimizer = LocalOptimizer(engine.optimizer, params, engine.schema.slices)
    random, size = np.random.default_rng(0), min(batch, engine.train_size)

    def measured(train: bool) -> float:
        noise, signal = 0.0, 0.0
        for step in range(STEPS):
            for out in (first, second):
                engine.gradient(params, random.choice(engine.train_size, size, replace=False), out, 0, step)
            noise += float(((first - second) ** 2).sum()) / 2
            signal += float((first * second).sum())
            if train:
                optimizer.step(params, first)
        return noise / max(signal, noise / STEPS) if noise else 0.0

    with np.errstate(all="ignore"):
        start = measured(train=False)
        measured(train=True)
        end = measured(train=True)
        return 2 * (1 + start) * (1 + end) / (2 + start + end) - 1
