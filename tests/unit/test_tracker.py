"""Sums over replicas from which evaluations are made."""

from __future__ import annotations

import math

import numpy as np

from flockstep.runtime.tracker import Tick


def tick(*replicas: list[float]) -> Tick:
    made = Tick(set())
    for params in replicas:
        made.add_worker(np.array(params), 1, 0)
    return made


def test_the_distance_of_the_replicas_from_their_mean() -> None:
    assert tick([1.0, 2.0], [1.0, 2.0]).divergence() == 0.0
    assert tick([0.0, 0.0], [6.0, 8.0]).divergence() == 5.0


def test_replicas_that_are_not_finite_do_not_count_as_equal() -> None:
    with np.errstate(invalid="ignore"):
        assert math.isnan(tick([1.0, 2.0], [math.nan, 2.0]).divergence())
        assert math.isnan(tick([1.0, 2.0], [math.inf, 2.0]).divergence())
