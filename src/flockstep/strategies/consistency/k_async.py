"""A step for every K gradients, none of which is cancelled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flockstep.errors import ConfigurationError
from flockstep.expression import SHOWN, WORKERS, searched
from flockstep.strategies.consistency.base import Consistency, Push, Read, View


@dataclass(frozen=True)
class KAsync(Consistency):
    """K-async SGD (Dutta et al. 2018, section 3.2): a step for the first `k` learners; the others go on.

    Whoever has pushed waits until its gradient has been applied; the others' arrive later, of an older version. A
    gradient counts as 1/k of a step, also where fewer than k workers are left.
    """

    k: int = field(default=1, metadata=SHOWN | searched(1, WORKERS, log=False))

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ConfigurationError(f"k must be >= 1 gradients, got {self.k}; 1 is asynchronous")

    completeness = 3

    @property
    def gathers(self) -> int:
        """k."""
        return self.k

    survives = True

    def check(self, workers: int) -> None:
        """There must be so many learners."""
        if self.k > workers:
            raise ConfigurationError(f"k must be <= workers, {workers}, got {self.k}; use bsp for all of them")

    def full_step(self, workers: int) -> int:
        """K."""
        return self.k

    def admitted(self, reads: Sequence[Read], view: View) -> list[Read]:
        """Those whose gradient has been applied; that there is a newer version is not enough."""
        return [read for read in reads if not view.waiting(read.rank)]

    def released(self, pending: Sequence[Push], view: View) -> list[list[Push]]:
        """Every k, which are of as many learners, since who has pushed waits; fewer where fewer live."""
        k = min(self.k, view.live)
        return [list(pending[i : i + k]) for i in range(0, len(pending) - k + 1, k)] if k else []

    def flushed(self, pending: Sequence[Push], view: View) -> list[list[Push]]:
        """What is left."""
        return [list(pending)] if pending else []


@dataclass(frozen=True)
class KBatchAsync(KAsync):
    """K-batch-async SGD (Dutta et al. 2018, section 3.2): a step for every `k` gradients, whoever they are from."""

    gathers = 0

    def check(self, workers: int) -> None:
        """Any number from 1 on will do."""

    def admitted(self, reads: Sequence[Read], view: View) -> list[Read]:
        """Everyone, at once."""
        return list(reads)

    def released(self, pending: Sequence[Push], view: View) -> list[list[Push]]:
        """The first k, if there are as many."""
        return [list(pending[: self.k])] if len(pending) >= self.k else []
