"""Consistency rules that take a step for every k gradients, and cancel no gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flockstep.errors import require
from flockstep.expression import SHOWN
from flockstep.strategies.consistency.base import Consistency, ConsistencyView, Push, Read


@dataclass(frozen=True)
class KAsync(Consistency):
    """K-async SGD (Dutta et al. 2018, section 3.2): the gradients of the first `k` learners make a step; no gradient is
    canceled.

    A worker that has pushed waits until its gradient has been applied; the gradients of the other workers arrive later,
    computed with an older version. A gradient counts as 1/k of a step, even when fewer than k workers are left.
    """

    k: int = field(default=1, metadata=SHOWN)

    def __post_init__(self) -> None:
        require(self.k >= 1, "k", ">= 1 gradients", self.k, "use 1 for asynchronous steps")

    delivery = "unbounded delay"
    one_each = True

    @property
    def gathers(self) -> int:
        return self.k

    survives = True

    def check(self, workers: int) -> None:
        require(
            self.k <= workers, "k", f"<= {workers}, the number of workers", self.k, "use bsp to wait for all gradients"
        )

    def full_step(self, workers: int) -> int:
        return self.k

    def admitted(self, reads: Sequence[Read], view: ConsistencyView) -> list[Read]:
        """Return the read requests of workers whose own gradient has been applied. A newer version alone does not admit
        a read.
        """
        return [read for read in reads if not view.waiting(read.rank)]

    def released(self, pending: Sequence[Push], view: ConsistencyView) -> list[list[Push]]:
        """Return groups of k gradients; groups are smaller if fewer than k workers are alive.

        A worker that has pushed waits, so the k gradients of a group come from k learners.
        """
        k = min(self.k, view.live)
        return [list(pending[i : i + k]) for i in range(0, len(pending) - k + 1, k)] if k else []

    def flushed(self, pending: Sequence[Push], view: ConsistencyView) -> list[list[Push]]:
        return [list(pending)] if pending else []


@dataclass(frozen=True)
class KBatchAsync(KAsync):
    """K-batch-async SGD (Dutta et al. 2018, section 3.2): every `k` gradients make a step; no gradient is canceled."""

    gathers = 0
    one_each = False

    def check(self, workers: int) -> None:
        """Accept any number of workers: k gradients may come from fewer than k workers."""

    def admitted(self, reads: Sequence[Read], view: ConsistencyView) -> list[Read]:
        """Return all read requests, because no learner waits."""
        return list(reads)

    def released(self, pending: Sequence[Push], view: ConsistencyView) -> list[list[Push]]:
        """Return the first k gradients as one group, once k gradients have arrived."""
        return [list(pending[: self.k])] if len(pending) >= self.k else []
