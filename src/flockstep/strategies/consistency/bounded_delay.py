"""A task may start once all that lie tau before it have finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from flockstep.errors import ConfigurationError
from flockstep.expression import SHOWN, searched
from flockstep.strategies.consistency.base import ClockRule, Push, by_timestamp


@dataclass(frozen=True)
class BoundedDelay(ClockRule):
    """Bounded delay (Li et al. 2014, section 3.4): task t starts when all tasks up to t - tau - 1 have finished.

    A task is a worker's push and pull; gradients are applied as they arrive, so that, unlike with `ssp`, a reader may
    see some that are further ahead than its bound. As with `ssp`, every gradient counts the same whatever tau: with
    `weight="mean"` as 1/n of a step, n being the number of workers that the run began with, an effective rate of
    lr / n for a gradient, so that tau = 0 is bulk synchronous, bit for bit; with `weight="sum"` as a whole step, an
    effective rate of lr, which is the sum over workers of the paper's algorithm 1, so that a bound that never binds is
    asynchronous.
    """

    tau: int = field(default=4, metadata=SHOWN | searched(0, 16, log=False))
    weight: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        if self.tau < 0:
            raise ConfigurationError(f"tau must be >= 0 tasks, got {self.tau}; use asynchronous for no bound")

    @property
    def completeness(self) -> Literal[1, 2, 3, 4]:
        """Bounded delay; none with tau = 0."""
        return 2 if self.tau else 1

    @property
    def survives(self) -> bool:
        """A dead worker's clock no longer counts."""
        return self.tau > 0

    def full_step(self, workers: int) -> int:
        """One gradient of each worker, or a single one."""
        return workers if self.weight == "mean" else 1

    def admits(self, clock: int, slowest: int) -> bool:
        """t - tau <= slowest clock."""
        return clock - self.tau <= slowest

    def releases(self, pending: Sequence[Push], slowest: int) -> list[list[Push]]:
        """Each at once; with tau = 0 those of steps that everyone has pushed."""
        if self.tau:
            return [[push] for push in pending]
        return by_timestamp([push for push in pending if push.timestamp < slowest])
