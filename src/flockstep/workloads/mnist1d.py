"""A workload with MNIST-1D, procedural signals of ten classes (Greydanus 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flockstep.frameworks.base import Data, Job
from flockstep.optimizers.base import Optimizer
from flockstep.optimizers.sgd import SGD
from flockstep.workloads.base import Workload, generator, require_at_least, require_module, tuned_job

Floats = npt.NDArray[np.float64]

CLASSES = 10
LENGTH = 40
"""Number of points of a signal after all transformations."""

# The constants of the paper: the ten digit templates, and the size of each random transformation.
TEMPLATES = (
    (5, 6, 6.5, 6.75, 7, 7, 7, 7, 6.75, 6.5, 6, 5),
    (5, 3, 3, 3.4, 3.8, 4.2, 4.6, 5, 5.4, 5.8, 5, 5),
    (5, 6, 6.5, 6.5, 6, 5.25, 4.75, 4, 3.5, 3.5, 4, 5),
    (5, 6, 6.5, 6.5, 6, 5, 5, 6, 6.5, 6.5, 6, 5),
    (5, 4.4, 3.8, 3.2, 2.6, 2.6, 5, 5, 5, 5, 5, 5),
    (5, 3, 3, 3, 3, 5, 6, 6.5, 6.5, 6, 4.5, 5),
    (5, 4, 3.5, 3.25, 3, 3, 3, 3, 3.25, 3.5, 4, 5),
    (5, 7, 7, 6.6, 6.2, 5.8, 5.4, 5, 4.6, 4.2, 5, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 4, 3.5, 3.5, 4, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 5, 5, 4.7, 4.3, 5),
)
PADDING = (36, 60)
SCALE = 0.4
SHIFT = 48
SMOOTH_NOISE, SMOOTH_SIGMA = 0.25, 2.0
POINT_NOISE = 0.02
SHEAR = 0.75


@dataclass(frozen=True)
class Mnist1D(Workload):
    """Classify noisy, shifted, stretched and sheared digit templates with a 1-D CNN (28,030 parameters)."""

    batch: int = 32
    epochs: float = 30.0
    optimizer: Optimizer = SGD(lr=0.1)
    target: float = 0.9
    train: int = 4000
    test: int = 1000
    data_seed: int = 42

    def __post_init__(self) -> None:
        require_at_least(1, train=self.train, test=self.test)
        require_at_least(0, data_seed=self.data_seed)

    def job(self, seed: int) -> Job:
        require_module("torch", "torch", "the workload mnist1d")
        from flockstep.workloads import models

        return tuned_job(
            self,
            "mnist1d",
            model=lambda: models.signal_cnn(seed),
            data=self._data,
            loss=models.cross_entropy,
            least_steps=900,
        )

    def _data(self) -> Data:
        x, y = signals(self.train + self.test, self.data_seed)
        return Data(x[: self.train, None], y[: self.train], x[self.train :, None], y[self.train :])


def signals(count: int, seed: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return `count` signals (count, 40), normalized to mean 0 and variance 1 over all signals, and their digits
    (count,), equally frequent.
    """
    rng = generator("mnist1d", seed)
    labels = rng.permutation(np.arange(count) % CLASSES)
    raw = np.array(TEMPLATES)
    unit = (raw - raw.mean(1, keepdims=True)) / raw.std(1, keepdims=True)
    templates = np.asarray((unit - unit[:, :1]) / 6)  # they start at 0
    wide, inside = _stretched(templates[labels], rng.integers(PADDING[0], PADDING[1] + 1, count))
    wide *= 1 + SCALE * (rng.random((count, 1)) - 0.5)
    shift = (np.arange(wide.shape[1]) - rng.integers(0, SHIFT, (count, 1))) % wide.shape[1]
    wide, inside = np.take_along_axis(wide, shift, 1), np.take_along_axis(inside, shift, 1)
    wide = np.where(inside, wide, _smoothed(SMOOTH_NOISE * rng.standard_normal(wide.shape)))
    wide += POINT_NOISE * rng.standard_normal(wide.shape)
    wide -= SHEAR * (rng.random((count, 1)) - 0.5) * np.linspace(-0.5, 0.5, wide.shape[1])
    x = _interpolated(wide, np.linspace(0, wide.shape[1] - 1, LENGTH)[None])
    return ((x - x.mean()) / x.std()).astype(np.float32), labels.astype(np.int64)


def _stretched(short: Floats, padding: npt.NDArray[Any]) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Append zeros to each row, stretch all rows to one length, and return a mask of the points before the zeros."""
    length = short.shape[1]
    padded = np.pad(short, ((0, 0), (0, PADDING[1])))
    where = np.linspace(0, 1, length + PADDING[1]) * (length + padding[:, None] - 1)
    return _interpolated(padded, where), where < length


def _interpolated(rows: Floats, where: Floats) -> Floats:
    """Interpolate each row linearly at the positions `where` (one row of positions, or one for each row)."""
    left = np.minimum(where.astype(np.int64), rows.shape[1] - 2)
    part = where - left
    left = np.broadcast_to(left, (len(rows), where.shape[1]))
    values: Floats = np.take_along_axis(rows, left, 1) * (1 - part) + np.take_along_axis(rows, left + 1, 1) * part
    return values


def _smoothed(noise: Floats) -> Floats:
    """Filter the rows with a Gaussian window of four standard deviations, mirrored at both ends."""
    radius = round(4 * SMOOTH_SIGMA)
    window = np.exp(-0.5 * (np.arange(-radius, radius + 1) / SMOOTH_SIGMA) ** 2)
    mirrored = np.pad(noise, ((0, 0), (radius, radius)), mode="symmetric")
    smooth = np.zeros_like(noise)
    for k, weight in enumerate(window / window.sum()):
        smooth += weight * mirrored[:, k : k + noise.shape[1]]
    return smooth
