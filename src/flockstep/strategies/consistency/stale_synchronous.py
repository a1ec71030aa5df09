"""Stale synchronous parallel consistency rules: servers send parameters on request, workers cache parameters, or
servers send parameters eagerly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from flockstep.errors import require
from flockstep.expression import SHOWN
from flockstep.strategies.access import Access, CachedCopies, EagerCopies
from flockstep.strategies.consistency.base import ClockRule, ConsistencyView, Push, by_timestamp


@dataclass(frozen=True)
class StaleSynchronous(ClockRule):
    """Stale synchronous parallel (Ho et al. 2013) with staleness bound s, in clocks.

    A read at clock c waits until it can see every update with timestamp <= c - s - 1, and never sees an update with
    timestamp > c + s - 1: a gradient with timestamp t is applied once the slowest clock has reached t - s + 1. A
    worker's own updates are always visible to that worker.

    Every gradient has the same weight, whenever it is applied. With `weight="mean"` a gradient counts as 1/n of a step,
    n being the number of workers at the start of the run, so that s = 0 is bulk synchronous, bit for bit. With
    `weight="sum"` a gradient counts as a whole step, which is the paper's sum of all updates, so that a bound that
    never binds is asynchronous, and the learning rate has to be about n times smaller. Gradients of equal timestamp
    that become applicable together make one step of the optimizer.

    A dead worker's clock no longer counts, so the other workers continue with unchanged weights; with s = 0, every step
    would lack the dead worker's part, so the run stops.
    """

    s: int = field(default=3, metadata=SHOWN)
    weight: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        require(self.s >= 0, "staleness bound", ">= 0", self.s, "use asynchronous for no bound")

    def most_stale(self, workers: int) -> int:
        """Largest staleness of a gradient, in updates. Between a worker's read at clock c and the application of the
        gradient computed from it, the server may apply the gradients of every other worker with timestamps c - s to c +
        s, and the worker's own s earlier gradients.
        """
        return (2 * self.s + 1) * (workers - 1) + self.s if self.s else 0

    def full_step(self, workers: int) -> int:
        return workers if self.weight == "mean" else 1

    @property
    def bound(self) -> int:
        return self.s

    def flushed(self, pending: Sequence[Push], view: ConsistencyView) -> list[list[Push]]:
        """Return the remaining gradients, one group for each timestamp. Gradients remain if workers do not wait for the
        answer to their last push.
        """
        return by_timestamp(pending)


@dataclass(frozen=True)
class CachedStaleSynchronous(StaleSynchronous):
    """Stale synchronous parallel with cached copies, as in SSPTable (Ho et al. 2013, section 3): a worker requests
    parameters only when it must.

    The bound s is that of `ssp`, but a worker computes with its copy until the copy is older than the bound allows, and
    only then requests a new copy, which saves messages and makes gradients staler. The worker adds its own updates that
    the copy does not yet include (read-my-writes), as under `essp`.
    """

    @property
    def access(self) -> Access:
        return CachedCopies(self.s)


@dataclass(frozen=True)
class EagerStaleSynchronous(StaleSynchronous):
    """Eager SSP, ESSP (Dai et al. 2015, section 4): servers send parameters whenever the slowest clock advances.

    The bound s is that of `ssp`, but workers request nothing: whenever the slowest clock advances, the servers send the
    new parameters to every worker. A worker computes with the newest copy that has arrived, and waits only if this copy
    is older than the bound allows. The worker adds its own updates that the copy does not yet include (read-my-writes),
    each as a step of the worker's own optimizer times 1/n (times 1 with `weight="sum"`). With the rule `plain` and SGD
    without momentum, the servers add exactly the same; otherwise, the worker's additions are an approximation until the
    next copy arrives.
    """

    @property
    def access(self) -> Access:
        return EagerCopies(self.s)
