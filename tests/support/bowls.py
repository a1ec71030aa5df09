"""Unequal quadratics: every client's loss is a bowl of its own, with an optimum and curvatures of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.numpy import Model, Views


class Bowls(Model):
    """The mean of bowls ½ a (w - b)² over samples (b, a), each of shape (d,); from w = 0."""

    dtype = "float64"

    def __init__(self, dimension: int):
        self.dimension = dimension

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"w": (self.dimension,)}

    def initial(self, random: np.random.Generator) -> Views:
        return {"w": np.zeros(self.dimension)}

    def gradients(self, params: Views, x: FlatArray, y: FlatArray, out: Views) -> FlatArray:
        apart = params["w"][:, None, :] - x[:, :, : self.dimension]
        slopes = apart * x[:, :, self.dimension :]
        np.mean(slopes, axis=1, out=out["w"])
        losses: FlatArray = np.sum(apart * slopes, axis=2).mean(axis=1) / 2
        return losses

    def outputs(self, params: Views, x: FlatArray) -> FlatArray:
        return np.concatenate([params["w"] - x[:, : self.dimension], x[:, self.dimension :]], axis=1)

    def loss(self, params: Views, outputs: FlatArray, y: FlatArray) -> float:
        apart, curvature = outputs[:, : self.dimension], outputs[:, self.dimension :]
        return float(np.mean(np.sum(apart * apart * curvature, axis=1)) / 2)


def bowls(
    optima: Sequence[Sequence[float]], curvatures: Sequence[Sequence[float]], sizes: Sequence[int] = (), lr: float = 0.1
):
    """Return a job with one bowl for each client, and the samples of each client, all alike, by default 8."""
    sizes = sizes or [8] * len(optima)
    rows = [np.concatenate([b, a]) for b, a in zip(optima, curvatures, strict=True)]
    x = np.repeat(np.array(rows, float), sizes, axis=0)
    y = np.zeros(len(x))

    def metric(outputs: FlatArray, targets: FlatArray) -> float:
        return float(np.mean(np.square(outputs)))

    job = Job(
        lambda: Bowls(len(optima[0])),
        lambda: Data(x, y, x, y),
        f"sgd(lr={lr})",
        metric=metric,
        higher_is_better=False,
        batch=4,
    )
    return job, np.split(np.arange(len(x)), np.cumsum(sizes)[:-1])


def drawn(clients: int, dimension: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return optima and curvatures of clients, (clients, dimension) each."""
    random = np.random.default_rng(seed)
    return random.normal(size=(clients, dimension)), random.uniform(0.2, 3, (clients, dimension))
