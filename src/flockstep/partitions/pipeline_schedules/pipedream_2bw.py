"""PipeDream-2BW: a pipeline without flushes, whose stages store two versions of their weights."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.errors import require
from flockstep.partitions.pipeline_schedules.base import UnflushedSchedule


@dataclass(frozen=True)
class PipeDream2BW(UnflushedSchedule):
    """1F1B without flushes, with gradients of M micro-batches accumulated (Narayanan et al. 2021, section 3.1).

    Every stage computes the gradient of step t with the weights before the latest update: w(t+1) = w(t) - η ∇f(w(t-1)).
    With M >= K micro-batches two versions are enough.
    """

    def check(self, stages: int, microbatches: int) -> None:
        rule = f">= the {stages} stages for pipedream_2bw, which keeps two versions of the weights"
        require(microbatches >= stages, "microbatches", rule, microbatches, f"use {stages} or more")

    def delay(self, stage: int, stages: int) -> int:
        return 1 if stages > 1 else 0
