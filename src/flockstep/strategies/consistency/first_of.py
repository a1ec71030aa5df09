"""Consistency rules that take a step for the first gradients of a version, and cancel the other gradients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from flockstep.errors import ConfigurationError, PeerLost, require
from flockstep.expression import SHOWN
from flockstep.strategies.access import CancelStale
from flockstep.strategies.consistency.base import Consistency, ConsistencyView, Push, Read


class FirstOf(Consistency):
    """Base class of rules that take a step for the first `needed` gradients of the current version; late workers cancel
    their gradients.

    Each gradient counts as 1/needed of a step, even near the end of a run, when fewer workers have steps left.
    """

    access = CancelStale()
    delivery = "partial"
    one_each = True

    @property
    def survives(self) -> bool | int:
        """Return True: any number of workers may die, as long as `needed` workers are left."""
        return True

    @abstractmethod
    def needed(self, workers: int) -> int:
        """Return the number of gradients that make a step."""

    def full_step(self, workers: int) -> int:
        return self.needed(workers)

    def admitted(self, reads: Sequence[Read], view: ConsistencyView) -> list[Read]:
        """Return the read requests of workers that have not yet read the newest version of the parameters."""
        return [read for read in reads if read.version < view.version]

    def released(self, pending: Sequence[Push], view: ConsistencyView) -> list[list[Push]]:
        """Return the first `needed` gradients of the current version, in order of rank.

        Near the end of a run, a step takes the gradients of all workers that have not finished.

        Raises:
            PeerLost: after worker deaths, fewer workers are left than a step needs.
        """
        needed = self.needed(view.workers)
        if view.workers - view.lost < needed:
            raise PeerLost(
                f"a step takes the gradients of {needed} workers, but {view.lost} of {view.workers} workers are lost; "
                "configure fewer gradients per step"
            )
        current = [push for push in pending if push.version == view.version]
        needed = min(needed, view.live)  # late workers skipped versions and have steps left when others have none
        return [sorted(current[:needed], key=lambda push: push.rank)] if len(current) >= needed > 0 else []

    def dropped(self, pending: Sequence[Push], view: ConsistencyView) -> list[Push]:
        """Return the gradients that were computed with earlier versions of the parameters."""
        return [push for push in pending if push.version < view.version]

    def _require(self, needed: int, workers: int, what: str) -> None:
        if not 1 <= needed <= workers:
            raise ConfigurationError(
                f"{what}, but the number must be >= 1 and <= {workers}, the number of workers; choose another value"
            )


@dataclass(frozen=True)
class BackupWorkers(FirstOf):
    """Backup workers (Chen et al. 2016; Abadi et al. 2016, section 4.4): the first workers - b gradients make a step.

    The first N = workers - b gradients of a version make the next version. The other gradients are dropped, and workers
    that are still computing cancel their gradients. A step takes as long as the N-th fastest worker. Up to b workers
    may die.
    """

    b: int = field(default=1, metadata=SHOWN)

    def __post_init__(self) -> None:
        require(self.b >= 0, "b", ">= 0 backup workers", self.b, "use 0 to wait for all workers")

    @property
    def gathers(self) -> int:
        """The value -b of `Traits.gathers`: a step waits for the gradients of all workers but b."""
        return -self.b

    @property
    def survives(self) -> int:
        """Return b: as many workers may die as there are backup workers."""
        return self.b

    def check(self, workers: int) -> None:
        if workers > 1:
            self._require(
                self.needed(workers), workers, f"b={self.b} leaves {self.needed(workers)} gradients for a step"
            )

    def needed(self, workers: int) -> int:
        """Return the number of gradients that make a step: N = workers - b, or 1 for a single worker, which has no
        backup.
        """
        return workers - self.b if workers > 1 else 1


@dataclass(frozen=True)
class KSync(FirstOf):
    """K-sync SGD (Dutta et al. 2018, section 3.1): the gradients of the first `k` learners make a step; the other
    gradients are canceled.
    """

    k: int = field(default=1, metadata=SHOWN)

    @property
    def gathers(self) -> int:
        return self.k

    @property
    def least(self) -> int:
        """Return k: a step needs the gradients of k workers."""
        return self.k

    def check(self, workers: int) -> None:
        self._require(self.k, workers, f"k={self.k}")

    def needed(self, workers: int) -> int:
        return self.k


@dataclass(frozen=True)
class KBatchSync(FirstOf):
    """K-batch-sync SGD (Dutta et al. 2018, section 3.1): the first `k` batches of any learners make a step.

    A learner that has finished a batch computes another batch with the same version, until there are k batches; the
    others are canceled.
    """

    one_each = False
    k: int = field(default=1, metadata=SHOWN)

    def check(self, workers: int) -> None:
        require(self.k >= 1, "k", ">= 1 batches", self.k, "use 1 for a step after each batch")

    def needed(self, workers: int) -> int:
        return self.k

    def admitted(self, reads: Sequence[Read], view: ConsistencyView) -> list[Read]:
        """Return all read requests, because a learner that has pushed may compute another batch at once."""
        return list(reads)

    def released(self, pending: Sequence[Push], view: ConsistencyView) -> list[list[Push]]:
        """Return the first k gradients of the current version, in order of rank and clock."""
        current = [push for push in pending if push.version == view.version]
        first = sorted(current[: self.k], key=lambda push: (push.rank, push.timestamp))
        return [first] if len(current) >= self.k else []
