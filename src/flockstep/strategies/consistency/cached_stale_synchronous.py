"""Stale synchronous parallel with a cache at every worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from flockstep.strategies.consistency.base import Push, View
from flockstep.strategies.consistency.stale_synchronous import StaleSynchronous


@dataclass(frozen=True)
class CachedStaleSynchronous(StaleSynchronous):
    """Stale synchronous parallel as SSPTable does it (Ho et al. 2013, section 3): asking only when it must.

    The same bound s as `ssp`, but a worker computes on its copy until that is older than the bound allows, and only
    then asks for another: fewer messages, and staler gradients. Its own updates that the copy does not hold yet are
    added to it (read-my-writes) as `essp` does.
    """

    keeps_copies: ClassVar[bool] = True

    @property
    def slack(self) -> int:
        """The bound s."""
        return self.s

    def flushed(self, pending: Sequence[Push], view: View) -> list[list[Push]]:
        """Whatever is left."""
        return self.releases(pending, view.slowest + self.s + 1)
