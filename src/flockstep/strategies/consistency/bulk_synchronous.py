"""Bulk synchronous parallel consistency: all workers take each step together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flockstep.strategies.consistency.base import ClockRule, Push, by_timestamp


@dataclass(frozen=True)
class BulkSynchronous(ClockRule):
    """Bulk synchronous parallel (Valiant 1990): a step takes one gradient of every worker before any worker
    continues.
    """

    delivery = "synchronous"
    survives = False
    one_each = True

    def full_step(self, workers: int) -> int:
        return workers

    def admits(self, clock: int, slowest: int) -> bool:
        return clock <= slowest

    def releases(self, pending: Sequence[Push], slowest: int) -> list[list[Push]]:
        """Return the gradients of the steps that all workers have pushed."""
        return by_timestamp([push for push in pending if push.timestamp < slowest])
