"""Stale synchronous parallel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from flockstep.errors import ConfigurationError
from flockstep.expression import SHOWN, searched
from flockstep.strategies.consistency.base import ClockRule, Push, by_timestamp


@dataclass(frozen=True)
class StaleSynchronous(ClockRule):
    """Stale synchronous parallel (Ho et al. 2013), staleness bound s in clocks.

    A read at clock c waits until it can see every update with timestamp <= c - s - 1, and is never shown one with
    timestamp > c + s - 1: a gradient with timestamp t is applied once the slowest clock has reached t - s + 1. A
    worker's own updates are always visible to it. Every gradient counts the same, whenever it is released: with
    `weight="mean"` as 1/n of a step, n being the number of workers that the run began with, so that s = 0 is bulk
    synchronous, bit for bit; with `weight="sum"` as a whole step, which is the paper's sum of all updates, so that a
    bound that never binds is asynchronous, and the learning rate has to be about n times smaller. Gradients of the same
    timestamp that become applicable together make one step of the optimizer. A dead worker is taken out of the slowest
    clock, so the others go on, each with its weight; with s = 0 a step would miss a part, so there they stop.
    """

    s: int = field(default=3, metadata=SHOWN | searched(0, 16, log=False))
    weight: Literal["mean", "sum"] = "mean"

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

    def full_step(self, workers: int) -> int:
        """One gradient of each worker, or a single one."""
        return workers if self.weight == "mean" else 1

    def admits(self, clock: int, slowest: int) -> bool:
        """c - s <= slowest clock."""
        return clock - self.s <= slowest

    def releases(self, pending: Sequence[Push], slowest: int) -> list[list[Push]]:
        """Those with t - s + 1 <= slowest clock, by timestamp, then rank."""
        return by_timestamp([push for push in pending if push.timestamp - self.s + 1 <= slowest])
