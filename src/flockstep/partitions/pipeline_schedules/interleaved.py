"""Interleaved 1F1B: each stage holds several chunks of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flockstep.errors import require
from flockstep.expression import SHOWN
from flockstep.partitions.pipeline_schedules.base import FlushedSchedule, Turn, alternating


@dataclass(frozen=True)
class Interleaved(FlushedSchedule):
    """Interleaved 1F1B, in which each stage holds v = `chunks` chunks of the model (Narayanan et al. 2021, section
    2.2).

    Micro-batches pass through the chunks in groups of K. The stages idle for (K - 1) / (v M) of the time in which they
    compute, v times less than in 1F1B, and send v times as many activations.
    """

    chunks: int = field(default=2, metadata=SHOWN)

    def __post_init__(self) -> None:
        require(self.chunks >= 2, "chunks of interleaved", ">= 2", self.chunks, "use 1f1b for one chunk")

    def check(self, stages: int, microbatches: int) -> None:
        rule, near = f"a multiple of the {stages} stages for {self}", -(-microbatches // stages) * stages
        require(microbatches % stages == 0, "microbatches", rule, microbatches, f"use {near}")

    def turns(self, stage: int, stages: int, microbatches: int) -> Sequence[Turn]:
        turns: list[Turn] = []
        for kind, number in alternating(self._ahead(stage, stages), microbatches * self.chunks):
            group, place = divmod(number, stages * self.chunks)
            chunk = place // stages
            chunk = chunk if kind == "forward" else self.chunks - 1 - chunk
            turns.append((kind, group * stages + place % stages, chunk))
        return turns

    def in_flight(self, stage: int, stages: int, microbatches: int) -> int:
        return min(self._ahead(stage, stages), microbatches * self.chunks)

    def _ahead(self, stage: int, stages: int) -> int:
        """Number of forward passes before the first backward pass."""
        return 2 * (stages - stage - 1) + (self.chunks - 1) * stages + 1
