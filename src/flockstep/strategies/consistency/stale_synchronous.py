"""Stale synchronous parallel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from flockstep.errors import ConfigurationError
from flockstep.expression import SHOWN
from flockstep.strategies.consistency.base import ClockRule, Push, by_timestamp


@dataclass(frozen=True)
class StaleSynchronous(ClockRule):
    """Stale synchronous parallel (Ho et al. 2013), staleness bound s in clocks.

    A read at clock c waits until it can see every update with timestamp <= c - s - 1, and is never shown one with
    timestamp > c + s - 1: a gradient with timestamp t is applied once the slowest clock has reached t - s + 1. A
    worker's own updates are always visible to it. Gradients of the same timestamp that become applicable together are
    averaged into one step, so that s = 0 is bulk synchronous, bit for bit, and a bound that never binds is
    asynchronous; the paper, which has no server-side optimiser, adds them one by one. A dead worker is taken out of the
    slowest clock, so the others go on; with s = 0 they would silently train with a smaller batch, so there they stop.
    """

    s: int = field(default=3, metadata=SHOWN)

    def __post_init__(self) -> None:
        if self.s < 0:
            raise ConfigurationError(f"staleness bound must be >= 0, got {self.s}; use asynchronous for no bound")

    @property
    def completeness(self) -> Literal[1, 2, 3, 4]:
        """Bounded delay; none with s = 0."""
        return 2 if self.s else 1

    @property
    def survives(self) -> bool:
        """A dead worker's clock no longer counts."""
        return self.s > 0

    def admits(self, clock: int, slowest: int) -> bool:
        """c - s <= slowest clock."""
        return clock - self.s <= slowest

    def releases(self, pending: Sequence[Push], slowest: int) -> list[list[Push]]:
        """Those with t - s + 1 <= slowest clock, by timestamp, then rank."""
        return by_timestamp([push for push in pending if push.timestamp - self.s + 1 <= slowest])
