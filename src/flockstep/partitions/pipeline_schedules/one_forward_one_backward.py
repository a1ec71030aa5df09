"""1F1B: stages compute forward and backward passes alternately, with a flush at the end of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flockstep.partitions.pipeline_schedules.base import FlushedSchedule, Turn, alternating


@dataclass(frozen=True)
class OneForwardOneBackward(FlushedSchedule):
    """1F1B: stage s computes K - s forward passes, then one backward and one forward pass alternately (PipeDream-Flush,
    Narayanan et al. 2021).

    The stages idle as long as in GPipe, but stage s holds the activations of min(K - s, M) micro-batches only.
    """

    def turns(self, stage: int, stages: int, microbatches: int) -> Sequence[Turn]:
        return [(kind, number, 0) for kind, number in alternating(stages - stage, microbatches)]

    def in_flight(self, stage: int, stages: int, microbatches: int) -> int:
        return min(stages - stage, microbatches)
