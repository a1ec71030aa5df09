"""Periodic averaging in plain numpy, for the oracles of the strategies that build on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from flockstep.arrays.schema import FlatArray, slices
from flockstep.frameworks.base import Job
from flockstep.testing.strategies import GradientSource, small_job


def ring_mean(arrays: Sequence[FlatArray]) -> FlatArray:
    """The mean as a ring forms it: chunk c is summed from rank c onwards."""
    n, mean = len(arrays), np.empty_like(arrays[0])
    for chunk, part in enumerate(slices(len(mean), n)):
        mean[part] = arrays[chunk][part]
        for hop in range(1, n):
            mean[part] += arrays[(chunk + hop) % n][part]
    return mean / mean.dtype.type(n) if n > 1 else mean


def local_steps(
    n: int, steps: int, meet: Callable[[int, list[FlatArray]], None], job: Job | None = None
) -> list[FlatArray]:
    """n models that step on their own; `meet(t, models)` changes them in place after step t."""
    source = GradientSource(n, job or small_job())
    w = [source.start() for _ in range(n)]
    steppers = [source.stepper(replica) for replica in w]
    for step in range(1, steps + 1):
        for rank in range(n):
            steppers[rank].step(w[rank], source.gradient(rank, w[rank]))
        meet(step, w)
    return w
