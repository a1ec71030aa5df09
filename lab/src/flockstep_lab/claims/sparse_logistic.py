"""Logistic regression on categorical data in plain numpy; each sample uses few of the model's coefficients."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.numpy import Model, Views

FIELDS, CATEGORIES = 20, 1000
COEFFICIENTS = FIELDS * CATEGORIES
TRAIN, TEST = 60_000, 4_000


class SparseLogistic(Model):
    """Logistic regression whose logit is the sum of one coefficient per field.

    The gradient is zero for categories without a sample, unless `l2` > 0: the penalty changes every coefficient, which
    Niu et al. (2011) avoid.
    """

    dtype = "float32"

    def __init__(self, l2: float = 0.0):
        self.l2 = l2

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name → shape of the parameters: one vector of coefficients.

        There is no intercept, because every update would change it.
        """
        return {"w": (COEFFICIENTS,)}

    def initial(self, random: np.random.Generator) -> Views:
        """Return small random coefficients; at zero, the gradient of the penalty would be zero."""
        return {"w": 1e-3 * random.standard_normal(COEFFICIENTS)}

    def gradients(self, params: Views, x: FlatArray, y: FlatArray, out: Views) -> FlatArray:
        """Write the gradient to `out`, and return the losses.

        Each sample adds its error to the gradient of its categories' coefficients.
        """
        losses = np.empty(len(x))
        for row, (w, codes, labels, slope) in enumerate(zip(params["w"], x, y, out["w"], strict=True)):
            codes = np.asarray(codes, np.int64)
            logits = w[codes].sum(axis=1)
            losses[row] = _loss(logits, labels)
            error = (_probability(logits) - labels) / len(labels)
            slope[:] = np.bincount(codes.ravel(), np.repeat(error, FIELDS), COEFFICIENTS)
            if self.l2:
                slope += w.dtype.type(self.l2) * w
        return losses

    def outputs(self, params: Views, x: FlatArray) -> FlatArray:
        """Return the logits of N samples, of shape (N,)."""
        logits: FlatArray = params["w"][np.asarray(x, np.int64)].sum(axis=1)
        return logits

    def loss(self, params: Views, outputs: FlatArray, y: FlatArray) -> float:
        """Return the mean logistic loss, without the penalty."""
        return _loss(outputs, y)


def sparse_job(optimizer: str, batch: int, l2: float = 0.0) -> Job:
    """Return the job of a binary classification of categorical samples.

    The true probability of a sample's class follows from the sum of its categories' true coefficients.
    """

    def data() -> Data:
        random = np.random.default_rng(0)
        codes = random.integers(0, CATEGORIES, (TRAIN + TEST, FIELDS)) + CATEGORIES * np.arange(FIELDS)
        logits = random.standard_normal(COEFFICIENTS)[codes].sum(axis=1)
        y = (random.random(len(codes)) < _probability(logits)).astype(np.int64)
        return Data(codes[:TRAIN], y[:TRAIN], codes[TRAIN:], y[TRAIN:])

    def error(outputs: FlatArray, targets: FlatArray) -> float:
        """Share of misclassified samples, in percent."""
        return 100 * float(np.mean((outputs > 0) != targets))

    return Job(
        lambda: SparseLogistic(l2),
        data,
        optimizer,
        metric=error,
        higher_is_better=False,
        batch=batch,
        name="categories",
    )


def _probability(logits: FlatArray) -> FlatArray:
    probability: FlatArray = 1 / (1 + np.exp(-logits))
    return probability


def _loss(logits: FlatArray, labels: FlatArray) -> float:
    return float(np.mean(np.logaddexp(0, logits) - labels * logits, dtype=float))
