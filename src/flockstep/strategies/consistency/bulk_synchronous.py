"""Bulk synchronous parallel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flockstep.strategies.consistency.base import ClockRule, Push, by_timestamp


@dataclass(frozen=True)
class BulkSynchronous(ClockRule):
    """Bulk synchronous parallel (Valiant 1990): everyone's gradients of a step, averaged, before anyone goes on."""

    completeness = 1
    survives = False

    def full_step(self, workers: int) -> int:
        """One gradient of each worker."""
        return workers

    def admits(self, clock: int, slowest: int) -> bool:
        """Everyone has pushed as often as the reader."""
        return clock <= slowest

    def releases(self, pending: Sequence[Push], slowest: int) -> list[list[Push]]:
        """Those of steps that everyone has pushed."""
        return by_timestamp([push for push in pending if push.timestamp < slowest])
