"""Creates the program of each kind of part, and lets all parts of a model compute one batch in this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from flockstep.arrays.schema import FlatArray
from flockstep.errors import CompositionError
from flockstep.frameworks.base import Indices
from flockstep.messages import NO_NOTES, Message, Notes
from flockstep.partitions.pipeline import Pipeline
from flockstep.partitions.pipeline_schedules import FlushedSchedule, Turn
from flockstep.split.grid import GridModel, GridWay
from flockstep.split.joint import JointModel, JointWay
from flockstep.split.program import NeedPass, NeedRequest, PartProgram, PartRun, PartRunner
from flockstep.split.stage_program import PipelineStage, stage_notes
from flockstep.split.stages import PipelineModel, SplitModel


def program_of(model: SplitModel, run: PartRun) -> PartProgram:
    """Return the program of the part of `model` that `run` places in its replica.

    Raises:
        CompositionError: there is no program for the parts of such a model.
    """
    part = run.number
    run = replace(run, name=model.partition.part_name(part))
    match model:
        case GridModel():
            return GridWay(run, model)
        case PipelineModel():
            return PipelineStage(run, model.parts[part], model.pipeline, model.ties)
        case JointModel():
            return JointWay(run, model)
    raise CompositionError(f"no program computes the parts of {model.partition}; use partition=none")


def notes_between(model: SplitModel) -> Notes:
    """Return message tag → type of the note, for the messages between the parts of a replica."""
    if isinstance(model, GridModel):
        return stage_notes(len(model.exchanges), len(model.ties))
    if isinstance(model, PipelineModel):
        return stage_notes(model.pipeline.schedule.chunks, len(model.ties))
    return NO_NOTES


@dataclass(frozen=True)
class _OneBatch(FlushedSchedule):
    """A whole batch through all chunks, and back."""

    chunks: int = 1

    def turns(self, stage: int, stages: int, microbatches: int) -> Sequence[Turn]:
        order = range(self.chunks)
        return [*(("forward", 0, one) for one in order), *(("backward", 0, one) for one in reversed(order))]

    def in_flight(self, stage: int, stages: int, microbatches: int) -> int:
        return self.chunks


def computed_by_parts(
    model: PipelineModel, params: Iterable[FlatArray], indices: Indices
) -> tuple[float, list[FlatArray]]:
    """Let the programs of all parts compute one step over the samples `indices` in this process, each with its
    parameters (K,); return the loss, and the gradient of each part.

    The whole batch is one micro-batch, and activations travel without a codec. The programs copy the parameters, so
    that `params` need not hold those of all parts at once.
    """
    once = replace(model, pipeline=Pipeline(model.pipeline.stages, _OneBatch(model.pipeline.schedule.chunks)))
    arrived = deque[tuple[int, Message]]()  # delivered when no program runs, because an answer may resume the sender

    def send(to: int, message: Message) -> None:
        arrived.append((to, message))

    programs = [program_of(once, PartRun(0, part, 1, lambda: indices, send)) for part in range(len(model.parts))]
    runners = [PartRunner(program, lambda need: None, lambda gradient, loss: None) for program in programs]
    for runner, own in zip(runners, params, strict=True):
        runner.request(own)
    passing = runners
    while arrived or passing:
        while arrived:
            to, message = arrived.popleft()
            runners[to].deliver(message)
        passing = [runner for runner in runners if isinstance(runner.waiting, NeedPass)]
        for runner in passing:  # in the order of the parts, in which the unsplit model draws random numbers
            runner.passed()
    assert all(isinstance(runner.waiting, NeedRequest) for runner in runners), "a part waits for a message forever"
    return programs[0].loss, [program.gradient for program in programs]
