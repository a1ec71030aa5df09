"""Stale synchronous parallel with eager servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from flockstep.strategies.consistency.base import Push, Read, View
from flockstep.strategies.consistency.stale_synchronous import StaleSynchronous


@dataclass(frozen=True)
class EagerStaleSynchronous(StaleSynchronous):
    """Eager stale synchronous parallel, ESSP (Dai et al. 2015, section 4).

    The same bound s as `ssp`, but nobody asks: whenever the slowest clock advances, servers send fresh parameters to
    everyone. A worker computes on the newest copy that has arrived, and waits only where that is older than the bound
    allows. Its own updates that the copy does not hold yet are added to it (read-my-writes), each as a step of its own
    optimizer times 1/n (times 1 with `weight="sum"`), until their version arrives. That is what the servers add with
    the rule `plain` and sgd without momentum; otherwise it is an approximation until the servers' copy arrives.
    """

    eager: ClassVar[bool] = True
    keeps_copies: ClassVar[bool] = True

    @property
    def slack(self) -> int:
        """The bound s."""
        return self.s

    def admitted(self, reads: Sequence[Read], view: View) -> list[Read]:
        """Nobody asks."""
        return []

    def flushed(self, pending: Sequence[Push], view: View) -> list[list[Push]]:
        """Whatever is left."""
        return self.releases(pending, view.slowest + self.s + 1)
