"""ZB-H1: stages compute gradients of weights while they would otherwise wait for gradients of inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flockstep.partitions.pipeline_schedules.base import FlushedSchedule, Turn, alternating


@dataclass(frozen=True)
class ZeroBubbleH1(FlushedSchedule):
    """1F1B with the backward pass in two halves, input gradients first (ZB-H1, Qi et al. 2024, section 2.1).

    Stage s computes the gradient of the weights s micro-batches after the gradient of the inputs, so that the stages
    idle for (K - 1) (F + B - W) seconds in a step instead of (K - 1) (F + B + W), and every stage holds the activations
    of min(K, M) micro-batches, as the first stage does in 1F1B. F, B and W are the seconds of the forward pass and of
    the two halves of the backward pass.
    """

    def turns(self, stage: int, stages: int, microbatches: int) -> Sequence[Turn]:
        turns: list[Turn] = []
        for kind, number in alternating(stages - stage, microbatches):
            if kind == "forward":
                turns.append(("forward", number, 0))
                continue
            turns.append(("input_backward", number, 0))
            if number >= stage:
                turns.append(("weight_backward", number - stage, 0))
        late = range(max(0, microbatches - stage), microbatches)
        return [*turns, *(("weight_backward", number, 0) for number in late)]

    def in_flight(self, stage: int, stages: int, microbatches: int) -> int:
        return min(stages, microbatches)
