"""Bounded delay: a task may start once all tasks more than tau before it have finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from flockstep.errors import require
from flockstep.expression import SHOWN
from flockstep.strategies.consistency.base import ClockRule, ConsistencyView, Push


@dataclass(frozen=True)
class BoundedDelay(ClockRule):
    """Bounded delay (Li et al. 2014, section 3.4): task t starts when all tasks up to t - tau - 1 have finished.

    A task is a worker's push and pull. Gradients are applied as they arrive, so a reader may see gradients that are
    further ahead than its bound; `ssp` excludes this. As with `ssp`, every gradient has the same weight, whatever tau
    is. With `weight="mean"` a gradient counts as 1/n of a step, n being the number of workers at the start of the run,
    so that its effective learning rate is lr / n and tau = 0 is bulk synchronous, bit for bit. With `weight="sum"` a
    gradient counts as a whole step with learning rate lr, which is the sum over workers of the paper's algorithm 1, so
    that a bound that never binds is asynchronous.
    """

    tau: int = field(default=4, metadata=SHOWN)
    weight: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        require(self.tau >= 0, "tau", ">= 0 tasks", self.tau, "use asynchronous for no bound")

    @property
    def alone(self) -> bool:
        return self.tau > 0

    def full_step(self, workers: int) -> int:
        return workers if self.weight == "mean" else 1

    @property
    def bound(self) -> int:
        return self.tau

    def released(self, pending: Sequence[Push], view: ConsistencyView) -> list[list[Push]]:
        """Return each gradient in a separate group on arrival; if tau = 0, return one group for each step whose
        gradients all workers have pushed.
        """
        return [[push] for push in pending] if self.tau else super().released(pending, view)
