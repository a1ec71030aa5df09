"""The interface of a pipeline schedule, and the order of passes that most schedules share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from flockstep.errors import require
from flockstep.expression import Component

PassKind = Literal["forward", "backward", "input_backward", "weight_backward", "update"]
"""Kinds of passes of a pipeline; `input_backward` and `weight_backward` are the two halves of `backward`."""
Turn = tuple[PassKind, int, int]
"""One pass within a step: its kind, the number of its micro-batch, and the number of its chunk."""


@dataclass(frozen=True, slots=True)
class PipelinePass:
    """One pass of a stage over a micro-batch, or the update that ends a step of the stage."""

    kind: PassKind
    step: int
    """Number of the step whose batch contains the micro-batch."""
    microbatch: int = 0
    """Number of the micro-batch in its step."""
    chunk: int = 0
    """Number of the chunk among the chunks of this stage."""
    version: int = 0
    """Number of updates that the stage had made to the weights that the pass uses."""


class PipelineSchedule(Component):
    """The order in which each stage of a pipeline computes its passes, with the version of the weights of each pass.

    Symbols: K stages, stage s from 0 to K - 1, M micro-batches in a step. The model consists of v K chunks of
    consecutive layers: stage s holds the v chunks s, s + K, …, so that a micro-batch passes v times through all stages.
    A pass waits only for its input. A stage's update in a step uses the gradients of all micro-batches of the step.
    """

    noun: ClassVar[str] = "pipeline_schedule"
    synchronous: ClassVar[bool] = True
    """Whether all passes of a step use the weights after all earlier updates, as without a pipeline."""
    one_forward_at_a_time: ClassVar[bool] = False
    """Whether a micro-batch enters the first stage only after the previous micro-batch has left the last stage."""

    @property
    def chunks(self) -> int:
        """Number of chunks of the model that each stage holds (v)."""
        return 1

    def check(self, stages: int, microbatches: int) -> None:
        """Raise `ConfigurationError` unless the schedule exists for these stages and micro-batches."""

    @abstractmethod
    def passes(self, stage: int, stages: int, microbatches: int, steps: int) -> Iterator[PipelinePass]:
        """Yield the passes of a stage over `steps` steps, in order, each step with one `update`."""

    @abstractmethod
    def in_flight(self, stage: int, stages: int, microbatches: int) -> int:
        """Return the most micro-batches of one chunk whose activations the stage stores at once."""

    def delay(self, stage: int, stages: int) -> int:
        """Return the age, in updates, of a gradient's weights when a stage of a full pipeline applies it."""
        return 0

    def versions(self, stage: int, stages: int) -> int:
        """Return the largest number of versions of its weights that the stage stores at the same time."""
        return self.delay(stage, stages) + 1

    def source(self, work: PipelinePass, stage: int, stages: int) -> tuple[int, int] | None:
        """Return the stage and the chunk whose pass over the same micro-batch computes the input of the pass `work`.

        None if the input is data, or comes from the stage's own forward pass.
        """
        if work.kind == "forward":
            return self._before(work.chunk, stage, stages)
        return self._behind(work.chunk, stage, stages) if work.kind in ("backward", "input_backward") else None

    def target(self, work: PipelinePass, stage: int, stages: int) -> tuple[int, int] | None:
        """Return the stage and chunk whose pass over the micro-batch needs the output of `work`, if any."""
        if work.kind == "forward":
            return self._behind(work.chunk, stage, stages)
        return self._before(work.chunk, stage, stages) if work.kind in ("backward", "input_backward") else None

    def _before(self, chunk: int, stage: int, stages: int) -> tuple[int, int] | None:
        """Stage and chunk of the layers before a chunk."""
        if stage > 0:
            return stage - 1, chunk
        return (stages - 1, chunk - 1) if chunk > 0 else None

    def _behind(self, chunk: int, stage: int, stages: int) -> tuple[int, int] | None:
        """Stage and chunk of the layers behind a chunk."""
        if stage < stages - 1:
            return stage + 1, chunk
        return (0, chunk + 1) if chunk < self.chunks - 1 else None


class FlushedSchedule(PipelineSchedule):
    """A synchronous schedule: the pipeline becomes empty at the end of a step, before the update."""

    @abstractmethod
    def turns(self, stage: int, stages: int, microbatches: int) -> Sequence[Turn]:
        """Return the passes of a stage in one step, in order."""

    def passes(self, stage: int, stages: int, microbatches: int, steps: int) -> Iterator[PipelinePass]:
        turns = self.turns(stage, stages, microbatches)
        for step in range(steps):
            for kind, microbatch, chunk in turns:
                yield PipelinePass(kind, step, microbatch, chunk, version=step)
            yield PipelinePass("update", step, version=step)


class UnflushedSchedule(PipelineSchedule):
    """1F1B across steps: the pipeline stays full, and gradients are computed with earlier weights."""

    synchronous: ClassVar[bool] = False

    def version(self, step: int, stage: int, stages: int) -> int:
        """Return the number of the version of its weights that a stage uses for the passes of a step."""
        return max(0, step - self.delay(stage, stages))

    def passes(self, stage: int, stages: int, microbatches: int, steps: int) -> Iterator[PipelinePass]:
        for kind, number in alternating(stages - stage, steps * microbatches):
            step, microbatch = divmod(number, microbatches)
            yield PipelinePass(kind, step, microbatch, version=self.version(step, stage, stages))
            if kind == "backward" and microbatch == microbatches - 1:
                yield PipelinePass("update", step, version=step)

    def in_flight(self, stage: int, stages: int, microbatches: int) -> int:
        return stages - stage


def alternating(ahead: int, count: int) -> Iterator[tuple[PassKind, int]]:
    """Yield the 1F1B order: `ahead` forward passes, then one backward and one forward pass in turn."""
    ahead = min(ahead, count)
    for number in range(ahead):
        yield "forward", number
    for number in range(count):
        yield "backward", number
        if ahead + number < count:
            yield "forward", ahead + number


def one_microbatch(name: str, microbatches: int) -> None:
    """Raise `ConfigurationError` if a step has several micro-batches."""
    rule, way_out = f"1 for {name}, which updates the weights after every micro-batch", "use pipedream_2bw"
    require(microbatches == 1, "microbatches", rule, microbatches, f"{way_out} to accumulate gradients")
