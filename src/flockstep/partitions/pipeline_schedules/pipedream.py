"""PipeDream: a pipeline without flushes, whose stages store earlier versions of their weights."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.partitions.pipeline_schedules.base import UnflushedSchedule, one_microbatch


@dataclass(frozen=True)
class PipeDream(UnflushedSchedule):
    """1F1B without flushes (Narayanan et al. 2019): the backward pass uses the weights of the forward pass.

    Stage s updates its weights after every micro-batch, with a gradient computed with the weights of K - 1 - s updates
    ago. With `vertical_sync` every stage uses the version that the first stage uses, K - 1 updates ago.
    """

    vertical_sync: bool = False

    def check(self, stages: int, microbatches: int) -> None:
        one_microbatch("pipedream", microbatches)

    def delay(self, stage: int, stages: int) -> int:
        return stages - 1 if self.vertical_sync else stages - 1 - stage
