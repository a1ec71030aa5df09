"""Asynchronous consistency: no bound on staleness."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flockstep.strategies.consistency.base import ClockRule, ConsistencyView, Push


@dataclass(frozen=True)
class Asynchronous(ClockRule):
    """Asynchronous (Dean et al. 2012, Downpour SGD with n_push = n_fetch = 1): every gradient is applied on arrival,
    and every read is admitted.
    """

    delivery = "unbounded delay"
    alone = True
    bound = math.inf

    def full_step(self, workers: int) -> int:
        return 1

    def released(self, pending: Sequence[Push], view: ConsistencyView) -> list[list[Push]]:
        return [[push] for push in pending]
