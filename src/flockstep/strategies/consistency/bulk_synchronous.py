"""Bulk synchronous parallel consistency: all workers take each step together."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.strategies.consistency.base import ClockRule


@dataclass(frozen=True)
class BulkSynchronous(ClockRule):
    """Bulk synchronous parallel (Valiant 1990): a step waits for one gradient of every worker before any worker
    continues.
    """

    one_each = True
    bound = 0

    def full_step(self, workers: int) -> int:
        return workers
