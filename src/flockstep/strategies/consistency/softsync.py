"""n-softsync: a step is taken for every c gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flockstep.errors import require
from flockstep.expression import SHOWN
from flockstep.strategies.consistency.base import Consistency, ConsistencyView, Push, Read


@dataclass(frozen=True)
class SoftSync(Consistency):
    """n-softsync (Gupta, Zhang & Wang 2016; Zhang et al. 2016, section 3): a step is taken for every floor(workers / n)
    gradients.

    The server steps along the mean of c = floor(workers / n) gradients, from any workers and of any age; no worker
    waits. With n = 1, a step takes as many gradients as there are workers; with n = workers, each gradient makes a
    step, as under `asynchronous`. The long-run mean staleness is (workers - 1) / c. Gradients left over at the end make
    a shorter step: each gradient counts as 1/c of a step.
    """

    n: int = field(default=1, metadata=SHOWN)

    def __post_init__(self) -> None:
        require(self.n >= 1, "n", ">= 1", self.n, "use 1 to collect one gradient per worker before each step")

    delivery = "unbounded delay"
    survives = True

    def check(self, workers: int) -> None:
        require(
            self.n <= workers, "n", f"<= {workers}, the number of workers", self.n, "use asynchronous for n = workers"
        )

    def full_step(self, workers: int) -> int:
        """Number of gradients that make a step, c = floor(workers / n)."""
        return workers // self.n

    def admitted(self, reads: Sequence[Read], view: ConsistencyView) -> list[Read]:
        """Return all read requests, because no worker waits."""
        return list(reads)

    def released(self, pending: Sequence[Push], view: ConsistencyView) -> list[list[Push]]:
        """Return the first c gradients as one group, once c gradients have arrived."""
        c = self.full_step(view.workers)
        return [list(pending[:c])] if len(pending) >= c else []

    def flushed(self, pending: Sequence[Push], view: ConsistencyView) -> list[list[Push]]:
        return [list(pending)] if pending else []
