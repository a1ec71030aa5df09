"""Asynchronous consistency: no bound on staleness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flockstep.strategies.consistency.base import ClockRule, Push


@dataclass(frozen=True)
class Asynchronous(ClockRule):
    """Asynchronous (Dean et al. 2012, Downpour SGD with n_push = n_fetch = 1): every gradient on arrival,
    every read.
    """

    delivery = "unbounded delay"
    survives = True

    alone = True

    def full_step(self, workers: int) -> int:
        return 1

    def admits(self, clock: int, slowest: int) -> bool:
        return True

    def releases(self, pending: Sequence[Push], slowest: int) -> list[list[Push]]:
        return [[push] for push in pending]
