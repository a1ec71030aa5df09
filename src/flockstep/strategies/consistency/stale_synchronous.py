"""Stale synchronous parallel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from flockstep.errors import ConfigurationError
from flockstep.expression import SHOWN, searched
from flockstep.strategies.access import Access, Copies, SentCopies
from flockstep.strategies.consistency.base import ClockRule, Push, View, by_timestamp


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

    def flushed(self, pending: Sequence[Push], view: View) -> list[list[Push]]:
        """Whatever is left, where workers do not wait for their last push."""
        return by_timestamp(pending)


@dataclass(frozen=True)
class CachedStaleSynchronous(StaleSynchronous):
    """Stale synchronous parallel as SSPTable does it (Ho et al. 2013, section 3): asking only when it must.

    The same bound s as `ssp`, but a worker computes on its copy until that is older than the bound allows, and only
    then asks for another: fewer messages, and staler gradients. Its own updates that the copy does not hold yet are
    added to it (read-my-writes) as `essp` does.
    """

    @property
    def access(self) -> Access:
        """A copy, renewed when it is older than the bound."""
        return Copies(self.s)


@dataclass(frozen=True)
class EagerStaleSynchronous(StaleSynchronous):
    """Eager stale synchronous parallel, ESSP (Dai et al. 2015, section 4).

    The same bound s as `ssp`, but nobody asks: whenever the slowest clock advances, servers send fresh parameters to
    everyone. A worker computes on the newest copy that has arrived, and waits only where that is older than the bound
    allows. Its own updates that the copy does not hold yet are added to it (read-my-writes), each as a step of its own
    optimizer times 1/n (times 1 with `weight="sum"`), until their version arrives. That is what the servers add with
    the rule `plain` and sgd without momentum; otherwise it is an approximation until the servers' copy arrives.
    """

    @property
    def access(self) -> Access:
        """A copy, which servers renew."""
        return SentCopies(self.s)
