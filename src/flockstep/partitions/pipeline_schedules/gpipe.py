"""GPipe: all forward passes, then all backward passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flockstep.partitions.pipeline_schedules.base import FlushedSchedule, Turn


@dataclass(frozen=True)
class GPipe(FlushedSchedule):
    """All forward passes of a step, then all its backward passes (Huang et al. 2019, section 2.3).

    The stages idle for (K - 1) / (M + K - 1) of the time; each stage stores the activations of M micro-batches.
    """

    def turns(self, stage: int, stages: int, microbatches: int) -> Sequence[Turn]:
        numbers = range(microbatches)
        return [*(("forward", number, 0) for number in numbers), *(("backward", number, 0) for number in numbers)]

    def in_flight(self, stage: int, stages: int, microbatches: int) -> int:
        return microbatches
