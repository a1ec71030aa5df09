"""The program of one stage of a pipeline, for every driver: wait for an input, compute a pass, send its output.

A stage belongs to a worker. At the pass `update` it answers the request for a gradient of the worker's strategy, and
waits for the next request; the worker's parameters at request number v are version v of the stage's weights.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from itertools import dropwhile
from typing import Any

import numpy as np

from flockstep.arrays.kernels import name_of
from flockstep.arrays.schema import FlatArray, slices
from flockstep.codecs.base import Codec
from flockstep.errors import CompositionError, ConfigurationError, ProtocolError, RunError
from flockstep.feedback.nothing import NoFeedback
from flockstep.feedback.sender import bound_codec, random_of
from flockstep.frameworks.base import Indices
from flockstep.frameworks.stages import MicroBatch, ModelPart
from flockstep.messages import Mailbox, Message, Note, Notes, Wanted
from flockstep.partitions.pipeline import Pipeline
from flockstep.partitions.pipeline_schedules.base import PipelinePass, PipelineSchedule
from flockstep.programs import NeedGradient
from flockstep.strategies.base import Strategy

TAGS = {"forward": "activations", "backward": "errors", "input_backward": "errors"}
"""Kind of a pass → first word of the tag of the messages with its inputs and outputs."""
STREAM = 0x57A6E
"""Part of the seed of the stages' generators, which separates them from the nodes' generators."""
PASSED = "passed"
"""Tag of the message that a batch has left the last stage, for schedules with one forward pass at a time."""


class StageNote(Note, frozen=True):
    """The micro-batch that an array of activations, or of gradients of activations, belongs to."""

    step: int
    microbatch: int
    shape: tuple[int, ...] = ()
    """Shape of the array that the message encodes; the first axis is over samples."""
    dtype: str = ""
    loss: float = 0.0
    """Share of the micro-batch in the mean loss of its batch; sent backward only."""


def stage_notes(schedule: PipelineSchedule) -> Notes:
    """Return the kinds of notes of the messages between stages, by tag."""
    words = sorted(set(TAGS.values()))
    return dict.fromkeys(
        [PASSED, *(f"{word} {chunk}" for word in words for chunk in range(schedule.chunks))], StageNote
    )


def stage_random(seed: int, replica: int, number: int, step: int) -> np.random.Generator:
    """Return the generator of a stage for codecs with random choices in one step, equal for every driver."""
    return np.random.default_rng(np.random.SeedSequence((seed, STREAM, replica, number, step)))


def require_plain(need: NeedGradient, strategy: Strategy, pipeline: Pipeline) -> None:
    """Check that a worker's program asks for nothing but the gradient of its next batch.

    Raises:
        CompositionError: the stages of a pipeline do not compute what the program asks for.
    """
    if need.unless or need.samples or need.teachers or need.block is not None or need.turn is not None:
        raise CompositionError(
            f"{strategy} asks for more than the gradient of the worker's next batch, which the stages of {pipeline} do "
            "not compute; use partition=none, or a strategy such as local_sgd"
        )


@dataclass(frozen=True, slots=True)
class NeedPass:
    """A stage's request for the time of a pass; the driver resumes the stage when the pass has ended."""

    work: PipelinePass
    samples: int
    """Number of samples of the micro-batch."""


@dataclass(frozen=True, slots=True)
class NeedRequest:
    """A stage's wait for the next request for a gradient; it has answered the one before, if there was one."""


StageEffect = Wanted | NeedPass | NeedRequest
Send = Callable[[int, Message], None]


class PipelineStage:
    """One stage of one replica, with the versions of its weights and the gradient of the current step.

    Messages between stages have the numbers of the stages as addresses.
    """

    def __init__(
        self,
        rank: int,
        number: int,
        pipeline: Pipeline,
        part: ModelPart,
        steps: int,
        batch: Callable[[], Indices],
        send: Send,
        random: Callable[[int], np.random.Generator],
        taken: int = 0,
    ):
        """Create a stage whose weights are given by the first call of `requested`.

        Args:
            rank: number of the replica.
            number: number of the stage in its pipeline.
            pipeline: the partition.
            part: the framework's side of the stage.
            steps: number of steps of the run.
            batch: function that returns the samples of the replica's next batch; equal for all stages of a replica.
            send: function (stage, message) that sends a message to another stage of this replica.
            random: function that returns the generator of a step, for codecs with random choices.
            taken: number of steps that the stage has taken before, at the end of which nothing was in flight.
        """
        self.rank, self.number = rank, number
        self.mailbox = Mailbox()
        self.gradient: FlatArray = np.zeros(part.schema.size, part.schema.dtype)
        """Gradient (K,) of the current step; complete when the stage waits for a request."""
        self.loss = 0.0
        """Mean loss of the batch of the current step."""
        self._pipeline, self._schedule = pipeline, pipeline.schedule
        self._part, self._batch, self._send, self._random = part, batch, send, random
        passes = pipeline.schedule.passes(number, pipeline.stages, pipeline.microbatches, steps)
        self._passes = dropwhile(lambda one: one.step < taken, passes)
        self._randoms: dict[int, np.random.Generator] = {}
        self._batches: dict[int, list[MicroBatch]] = {}
        self._drawn = self._requests = taken
        self._versions: dict[int, FlatArray] = {}
        self._using: dict[tuple[int, int, int], int] = {}
        """Step, micro-batch and chunk of each forward pass whose backward pass is not complete → version."""
        self._own: dict[tuple[int, int], float] = {}
        """Step and micro-batch → loss of a forward pass through the last chunk, until its backward pass."""

    @property
    def versions(self) -> list[int]:
        """Versions of the weights that the stage holds."""
        return sorted(self._versions)

    def requested(self, params: FlatArray) -> None:
        """Keep the worker's parameters (K,) as the next version, at a request for a gradient."""
        self._versions[self._requests] = params.copy()
        self._requests += 1

    async def program(self) -> None:
        """Compute all passes of the run and send their outputs."""
        await _resumed(NeedRequest())
        for work in self._passes:
            if work.kind == "update":
                del self._batches[work.step]
                self._randoms.pop(work.step, None)
                await _resumed(NeedRequest())
                self.gradient[:] = 0
                self.loss = 0.0
                continue
            self._forget(work)
            message = await self._input(work)
            await _resumed(NeedPass(work, len(self._microbatch(work).indices)))
            if work.kind == "forward":
                self._forward(work, message)
            elif work.kind == "weight_backward":
                self._part.weight_backward(work.chunk, self._microbatch(work), self.gradient)
            else:
                self._backward(work, message)

    async def _input(self, work: PipelinePass) -> Message | None:
        """The message with the input of a pass; None if the input is data, or kept by this stage."""
        last = self._pipeline.stages - 1
        if self._schedule.one_forward_at_a_time and work.kind == "forward" and self.number == 0 < work.step and last:
            await self._message(PASSED, last, work.step - 1, 0)
        source = self._schedule.source(work, self.number, self._pipeline.stages)
        if source is None:
            return None
        return await self._message(f"{TAGS[work.kind]} {work.chunk}", source[0], work.step, work.microbatch)

    async def _message(self, tag: str, source: int, step: int, microbatch: int) -> Message:
        message: Message = await _resumed(Wanted(tag, source))
        note: StageNote = message.note
        if (note.step, note.microbatch) != (step, microbatch):
            raise ProtocolError(
                f"stage {self.number} expected {tag!r} of micro-batch {microbatch} of step {step}, got that of "
                f"micro-batch {note.microbatch} of step {note.step}; a message was lost, start the run again"
            )
        return message

    def _forward(self, work: PipelinePass, message: Message | None) -> None:
        self._using[work.step, work.microbatch, work.chunk] = work.version
        batch = self._microbatch(work)
        if (weights := self._versions.get(work.version)) is None:
            raise RunError(
                f"{self._schedule} uses version {work.version} of the weights of stage {self.number} in step "
                f"{work.step}, but the stage holds versions {self.versions}; fix the schedule"
            )
        outputs, loss = self._part.forward(work.chunk, weights, batch, self._decoded(message))
        if outputs is None:
            self._own[work.step, work.microbatch] = loss
        self._pass_on(work, outputs, 0.0)
        if self._schedule.one_forward_at_a_time and self.number == self._pipeline.stages - 1 > 0:
            self._send(0, Message(self.number, PASSED, note=StageNote(work.step, work.microbatch)))

    def _backward(self, work: PipelinePass, message: Message | None) -> None:
        batch, errors = self._microbatch(work), self._decoded(message)
        loss = self._own.pop((work.step, work.microbatch)) if message is None else message.note.loss
        if work.kind == "backward":
            below = self._part.backward(work.chunk, batch, errors, self.gradient)
        else:
            below = self._part.input_backward(work.chunk, batch, errors)
        if work.chunk == 0:
            self.loss += loss
        self._pass_on(work, below, loss)

    def _pass_on(self, work: PipelinePass, array: FlatArray | None, loss: float) -> None:
        """Send the output of a pass to the stage that needs it."""
        target = self._schedule.target(work, self.number, self._pipeline.stages)
        if target is not None:
            assert array is not None
            note = StageNote(work.step, work.microbatch, tuple(array.shape), name_of(array), loss)
            codec = self._codec(note)
            if work.step not in self._randoms:
                self._randoms[work.step] = self._random(work.step)
            data = codec.encode(array.reshape(-1), random_of(codec, self._randoms[work.step], work.step))
            self._send(target[0], Message(self.number, f"{TAGS[work.kind]} {target[1]}", data, note))

    def _decoded(self, message: Message | None) -> FlatArray | None:
        """The array that a message encodes."""
        if message is None:
            return None
        note: StageNote = message.note
        found = self._codec(note).decode(message.payload, math.prod(note.shape), note.dtype)
        return found.reshape(note.shape)

    def _codec(self, note: StageNote) -> Codec:
        """The codec of an array, as its sender and its receiver use it."""
        return bound_codec(self._pipeline.codec, NoFeedback(), (note.shape,), note.step)

    def _microbatch(self, work: PipelinePass) -> MicroBatch:
        """The samples of a pass; the batch is drawn when the first pass needs it."""
        while self._drawn <= work.step:
            indices, step, count = self._batch(), self._drawn, self._pipeline.microbatches
            if len(indices) < count:
                raise ConfigurationError(
                    f"microbatches must be at most the {len(indices)} samples of a batch, got {count}; use a larger "
                    "batch or fewer micro-batches"
                )
            self._batches[step] = [
                MicroBatch(self.rank, step, number, indices[part], (part.stop - part.start) / len(indices))
                for number, part in enumerate(slices(len(indices), count))
            ]
            self._drawn += 1
        return self._batches[work.step][work.microbatch]

    def _forget(self, work: PipelinePass) -> None:
        """Drop the versions that no pass from `work` on uses; versions of forward passes never decrease."""
        if work.kind == "forward":
            least = min([work.version, *self._using.values()])
            self._versions = {version: held for version, held in self._versions.items() if version >= least}
        elif work.kind != "input_backward":
            self._using.pop((work.step, work.microbatch, work.chunk))


class StageRunner:
    """Runs the program of a stage; a driver delivers its messages, ends its passes and passes on its gradients."""

    def __init__(
        self, stage: PipelineStage, begin: Callable[[NeedPass], None], answer: Callable[[FlatArray, float], None]
    ) -> None:
        """`begin`: called when a pass begins; `passed` must be called at its end, after `begin` has returned. `answer`:
        called with the gradient and the loss of each step.
        """
        self.stage = stage
        self.waiting: StageEffect | None = None
        self._begin, self._answer = begin, answer
        self._program: Coroutine[StageEffect, Message | None, None] = stage.program()
        self.done = False
        self._resume(None)

    def request(self, params: FlatArray) -> None:
        """Begin the next step, at the parameters (K,) of the stage's worker.

        Raises:
            RunError: the stage has computed all its steps.
        """
        if isinstance(self.waiting, NeedRequest) and not self.done:
            self.stage.requested(params)
            self._resume(None)
            if not self.done:
                return
        raise RunError(f"stage {self.stage.number} has no further step; start the run again")

    def deliver(self, message: Message) -> None:
        """Handle a message of another stage."""
        self.stage.mailbox.put(message)
        if isinstance(self.waiting, Wanted):
            self._look()

    def passed(self) -> None:
        """End the current pass."""
        self._resume(None)

    def close(self) -> None:
        """End the stage at its current point."""
        self._program.close()
        self.waiting, self.done = None, True

    def _look(self) -> None:
        """Resume the stage if the message that it waits for has arrived."""
        assert isinstance(self.waiting, Wanted)
        found = self.stage.mailbox.take(self.waiting)
        if found is not None:
            self._resume(found)

    def _resume(self, value: Message | None) -> None:
        began = self.waiting is not None
        try:
            self.waiting = effect = self._program.send(value)
        except StopIteration:
            self.done = True
            return
        if isinstance(effect, Wanted):
            self._look()
        elif isinstance(effect, NeedPass):
            self._begin(effect)
        elif began:
            self._answer(self.stage.gradient, self.stage.loss)


@types.coroutine
def _resumed(effect: StageEffect) -> Generator[StageEffect, Any, Any]:
    """Pass an effect to the stage's runner, and return the value with which it resumes the stage."""
    return (yield effect)
