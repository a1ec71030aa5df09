"""Pipeline schedules: the order in which each stage of a pipeline computes its passes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from flockstep.errors import require
from flockstep.expression import SHOWN, Component

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
