"""DDG: the modules of a network compute their backward passes at the same time, with delayed gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flockstep.partitions.pipeline_schedules.base import UnflushedSchedule, one_microbatch


@dataclass(frozen=True)
class DelayedGradients(UnflushedSchedule):
    """Decoupled parallel backpropagation (DDG, Huo et al. 2018): each module uses the error gradient that the module
    above computed in the previous step.

    Module k of K (stage s = k - 1) updates its weights in step t with the gradient of batch t - K + k with the weights
    of this batch's forward pass, and stores K - k + 1 inputs. The passes and versions are those of PipeDream without
    vertical synchronization; the forward pass remains sequential: a batch enters the first module after the previous
    batch has left the last module.
    """

    one_forward_at_a_time: ClassVar[bool] = True

    def check(self, stages: int, microbatches: int) -> None:
        one_microbatch("ddg", microbatches)

    def delay(self, stage: int, stages: int) -> int:
        return stages - 1 - stage
