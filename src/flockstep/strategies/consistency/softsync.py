"""A step for every c gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flockstep.errors import ConfigurationError
from flockstep.expression import SHOWN, WORKERS, searched
from flockstep.strategies.consistency.base import Consistency, Push, Read, View


@dataclass(frozen=True)
class SoftSync(Consistency):
    """n-softsync (Gupta, Zhang & Wang 2016; Zhang et al. 2016, section 3).

    The server steps along the mean of c = floor(workers / n) gradients, whoever they are from and however old; nobody
    waits. n = 1 steps after as many gradients as there are workers, n = workers after each, as `asynchronous` does. In
    the long run the mean staleness is (workers - 1) / c. What is left at the end makes a shorter step: each gradient
    counts as 1/c of one.
    """

    n: int = field(default=1, metadata=SHOWN | searched(1, WORKERS))

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ConfigurationError(f"n must be >= 1, got {self.n}; 1 collects a gradient per worker")

    completeness = 3
    survives = True

    def check(self, workers: int) -> None:
        """At least one gradient makes a step."""
        if self.n > workers:
            raise ConfigurationError(f"n must be <= workers, {workers}, got {self.n}; use asynchronous for n = workers")

    def full_step(self, workers: int) -> int:
        """c."""
        return workers // self.n

    def admitted(self, reads: Sequence[Read], view: View) -> list[Read]:
        """Everyone."""
        return list(reads)

    def released(self, pending: Sequence[Push], view: View) -> list[list[Push]]:
        """The first c, if there are as many."""
        c = self.full_step(view.workers)
        return [list(pending[:c])] if len(pending) >= c else []

    def flushed(self, pending: Sequence[Push], view: View) -> list[list[Push]]:
        """What is left."""
        return [list(pending)] if pending else []
