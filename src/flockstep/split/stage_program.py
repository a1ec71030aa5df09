"""The program of one stage of a pipeline, for every driver.

The program waits for an input, computes a pass, and sends the output. A stage belongs to a worker. At the pass
`update`, the stage answers the gradient request of the worker's strategy, and waits for the next request; the worker's
parameters at request number v are version v of the stage's weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import dropwhile

import numpy as np

from flockstep.arrays.kernels import name_of
from flockstep.arrays.schema import FlatArray, slices
from flockstep.codecs.base import Bytes, Codec, Shape
from flockstep.errors import ProtocolError, RunError
from flockstep.feedback.nothing import NoFeedback
from flockstep.feedback.sender import bound_codec, random_of
from flockstep.messages import PART, Array, Message, Note, Notes, Wanted, frozen
from flockstep.partitions.pipeline import Pipeline, check_microbatches
from flockstep.partitions.pipeline_schedules import PipelinePass
from flockstep.split.program import NeedPass, NeedRequest, PartProgram, PartRun, resumed
from flockstep.split.stages import MicroBatch, ModelPart, Tie

TAGS = {"forward": "activations", "backward": "errors", "input_backward": "errors"}
"""Kind of a pass → first word of the tag of the messages that carry the inputs and outputs of such passes."""
PASSED = "passed"
"""Tag of the message that a batch has left the last stage, for schedules with one forward pass at a time."""
LENT, RETURNED = "lent", "returned"
"""First words of two tags: a tied parameter sent to its other user, and this use's gradient sent back."""


class StageNote(Note, frozen=True):
    """Note with the micro-batch to which an array of activations, or of gradients of activations, belongs."""

    step: int
    microbatch: int
    shape: tuple[int, ...] = ()
    """Shape of the array that the message encodes; the first axis counts samples."""
    dtype: str = ""
    loss: float = 0.0
    """The micro-batch's share of the mean loss of its batch; only in messages of the backward pass."""


def stage_notes(chunks: int, ties: int = 0) -> Notes:
    """Return message tag → type of the note, for the messages between stages.

    `chunks` is the number of chunks of a stage, or of exchanges of a grid; `ties` is the number of `Tie`s.
    """
    words = [(word, chunks) for word in sorted(set(TAGS.values()))] + [(LENT, ties), (RETURNED, ties)]
    return dict.fromkeys([PASSED, *(f"{word} {one}" for word, count in words for one in range(count))], StageNote)


CodecOf = Callable[[Shape], Codec]
"""Function that takes the shape of an array and returns the codec for the array."""


class ActivationDifferences:
    """One end of a link between two stages, with the activations m of each sample that the receiver knows (AQ-SGD, Wang
    et al. 2022).

    A sample's activations a travel unencoded the first time, m ← a. Later, only the encoded difference C(a - m)
    travels, and both ends compute m ← m + C(a - m), with which the receiver continues. The encoding error shrinks as
    the weights converge, because the activations of a sample then change little between two passes over it.
    """

    def __init__(self) -> None:
        self._known: dict[int, FlatArray] = {}
        """Sample → the activations that both ends hold."""

    def encode(self, array: FlatArray, samples: Sequence[int], codec_of: CodecOf, random: np.random.Generator) -> Bytes:
        """Return the bytes to send for the activations (B, …) of B samples."""
        new, old = self._new(samples), self._old(samples, array)
        changes = array[~new] - old
        data = np.frombuffer(array[new].tobytes(), np.uint8)
        if changes.size:
            data = np.concatenate([data, codec_of(changes.shape).encode(changes.reshape(-1), random)])
        self.decode(data, array.shape, array.dtype.name, samples, codec_of)
        return data

    def decode(self, data: Bytes, shape: Shape, dtype: str, samples: Sequence[int], codec_of: CodecOf) -> FlatArray:
        """Return the activations of the given shape (B, …) that `data` encodes, and remember them."""
        new = self._new(samples)
        found = np.empty(shape, dtype)
        width = math.prod(shape[1:])
        split = int(new.sum()) * width * found.itemsize
        found[new] = data[:split].view(dtype).reshape(-1, *shape[1:])
        if not new.all():
            old = self._old(samples, found)
            changes = codec_of(old.shape).decode(data[split:], old.size, dtype)
            found[~new] = old + changes.reshape(old.shape)
        self._known.update((sample, row.copy()) for sample, row in zip(samples, found, strict=True))
        return found

    def _new(self, samples: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which samples both ends see for the first time."""
        return np.array([one not in self._known for one in samples])

    def _old(self, samples: Sequence[int], like: FlatArray) -> FlatArray:
        """The activations that both ends hold, of those samples that they have seen."""
        found = [self._known[one] for one in samples if one in self._known]
        return np.stack(found) if found else like[:0]


class PipelineStage(PartProgram):
    """One stage of one replica, with the versions of its weights and the gradient of the current step."""

    def __init__(self, run: PartRun, part: ModelPart, pipeline: Pipeline, ties: Sequence[Tie] = ()):
        """`ties`: the parameters that several parts compute with."""
        super().__init__(run, part)
        self._part, self._pipeline, self._schedule, taken = part, pipeline, pipeline.schedule, run.taken
        self._stage = run.number % pipeline.stages
        """Number of the stage in the pipeline; 0 in a grid, whose parts have one stage each."""
        self._lends = [(one, tie) for one, tie in enumerate(ties) if tie.owner == run.number]
        self._borrows = [(one, tie) for one, tie in enumerate(ties) if tie.user == run.number]
        self._slope = np.zeros(part.schema.size + part.borrowed, part.schema.dtype)
        """Gradient (K + B,) of what this stage computes with."""
        self.gradient = self._slope[: part.schema.size]
        passes = pipeline.schedule.passes(self._stage, pipeline.stages, pipeline.microbatches, run.steps)
        self._passes = dropwhile(lambda one: one.step < taken, passes)
        self._randoms: dict[int, np.random.Generator] = {}
        self._batches: dict[int, list[MicroBatch]] = {}
        self._drawn = self._requests = taken
        self._versions: dict[int, FlatArray] = {}
        self._using: dict[tuple[int, int, int], int] = {}
        """Step, micro-batch and chunk of each forward pass whose backward pass is not complete → version."""
        self._sent_before = [ActivationDifferences() for _ in range(self._schedule.chunks)]
        self._received_before = [ActivationDifferences() for _ in range(self._schedule.chunks)]
        """Chunk → activations of earlier steps, if differences from them travel."""
        self._own: dict[tuple[int, int], float] = {}
        """Step and micro-batch → loss of a forward pass through the last chunk, until its backward pass."""

    @property
    def versions(self) -> list[int]:
        """Numbers of the versions of the weights that the stage stores."""
        return sorted(self._versions)

    def requested(self, params: FlatArray) -> None:
        """Store the worker's parameters (K,), of a requested gradient, as the weights' next version."""
        if self._schedule.synchronous and self._versions:  # no pass uses the version before
            (held,) = self._versions.values()
            self._versions.clear()
        else:
            held = np.empty(len(self._slope), params.dtype)
        held[: len(params)] = params
        self._versions[self._requests] = held
        self._requests += 1

    async def program(self) -> None:
        """Compute all passes of the run, and send the outputs of each pass."""
        await resumed(NeedRequest())
        await self._begin_step()
        for work in self._passes:
            if work.kind == "update":
                del self._batches[work.step]
                self._randoms.pop(work.step, None)
                await self._end_step(work.step)
                await resumed(NeedRequest())
                self.loss = 0.0
                await self._begin_step()
                continue
            self._forget(work)
            message = await self._input(work)
            if work.kind == "forward":
                await self._forward(work, message)
            else:
                await self._backward(work, message)

    async def _begin_step(self) -> None:
        """Lend this stage's tied parameters, and borrow those of other stages."""
        step = self.versions[-1]
        weights = self._versions[step]
        for one, tie in self._lends:
            self._send(tie.user, f"{LENT} {one}", frozen(weights[tie.lent]), StageNote(step, 0))
        for one, tie in self._borrows:
            weights[tie.borrowed] = (await self._message(f"{LENT} {one}", tie.owner, step, 0)).payload
        self._slope[:] = 0

    async def _end_step(self, step: int) -> None:
        """Send the gradients of borrowed parameters to their owners, and add those of lent parameters."""
        for one, tie in self._borrows:
            self._send(tie.owner, f"{RETURNED} {one}", frozen(self._slope[tie.borrowed]), StageNote(step, 0))
        for one, tie in self._lends:
            self._slope[tie.lent] += (await self._message(f"{RETURNED} {one}", tie.user, step, 0)).payload

    async def _outputs(
        self, work: PipelinePass, weights: FlatArray, batch: MicroBatch, inputs: FlatArray | None
    ) -> tuple[FlatArray | None, float]:
        """Compute a forward pass; return the outputs, or None and the loss."""
        await self._time(work, batch)
        return self._part.forward(work.chunk, weights, batch, inputs)

    async def _slopes(self, work: PipelinePass, batch: MicroBatch, errors: FlatArray | None) -> FlatArray | None:
        """Compute a backward pass, of either half or both; return the gradient of its inputs, if they need one."""
        await self._time(work, batch)
        if work.kind == "weight_backward":
            self._part.weight_backward(work.chunk, batch, self._slope)
            return None
        return self._part.backward(work.chunk, batch, errors, self._slope if work.kind == "backward" else None)

    async def _time(self, work: PipelinePass, batch: MicroBatch) -> None:
        """Let the time of a pass go by."""
        share: float = getattr(self._part.shares[work.chunk], work.kind)
        await resumed(NeedPass(work.step, share, len(batch.indices)))

    async def _input(self, work: PipelinePass) -> Message | None:
        """The message with the input of a pass; None if the input is data, or kept by this stage."""
        last = self._pipeline.stages - 1
        if self._schedule.one_forward_at_a_time and work.kind == "forward" and self._stage == 0 < work.step and last:
            await self._message(PASSED, last, work.step - 1, 0)
        source = self._schedule.source(work, self._stage, self._pipeline.stages)
        if source is None:
            return None
        return await self._message(f"{TAGS[work.kind]} {work.chunk}", source[0], work.step, work.microbatch)

    def _send(self, to: int, tag: str, array: Array | None, note: StageNote) -> None:
        self._run.send(to, Message(PART + self.number, tag, array, note))

    async def _message(self, tag: str, source: int, step: int, microbatch: int) -> Message:
        message: Message = await resumed(Wanted(tag, PART + source))
        note: StageNote = message.note
        if (note.step, note.microbatch) != (step, microbatch):
            raise ProtocolError(
                f"{self.name} expected {tag!r} of micro-batch {microbatch} of step {step}, got "
                f"micro-batch {note.microbatch} of step {note.step}; a message was lost, start the run again"
            )
        return message

    async def _forward(self, work: PipelinePass, message: Message | None) -> None:
        self._using[work.step, work.microbatch, work.chunk] = work.version
        batch = self._microbatch(work)
        if (weights := self._versions.get(work.version)) is None:
            raise RunError(
                f"{self._schedule} uses version {work.version} of the weights of {self.name} in step "
                f"{work.step}, but {self.name} holds versions {self.versions}; fix the schedule"
            )
        outputs, loss = await self._outputs(work, weights, batch, self._decoded(message, work, batch))
        if outputs is None:
            self._own[work.step, work.microbatch] = loss
        self._pass_on(work, batch, outputs, 0.0)
        if self._schedule.one_forward_at_a_time and self._stage == self._pipeline.stages - 1 > 0:
            self._send(0, PASSED, None, StageNote(work.step, work.microbatch))

    async def _backward(self, work: PipelinePass, message: Message | None) -> None:
        batch = self._microbatch(work)
        below = await self._slopes(work, batch, self._decoded(message, work, batch))
        if work.kind == "weight_backward":
            return
        loss = self._own.pop((work.step, work.microbatch)) if message is None else message.note.loss
        if work.chunk == 0:
            self.loss += loss
        self._pass_on(work, batch, below, loss)

    def _pass_on(self, work: PipelinePass, batch: MicroBatch, array: FlatArray | None, loss: float) -> None:
        """Send the output of a pass to the stage that needs it."""
        target = self._schedule.target(work, self._stage, self._pipeline.stages)
        if target is not None:
            assert array is not None
            note = StageNote(work.step, work.microbatch, tuple(array.shape), name_of(array), loss)
            if work.step not in self._randoms:
                self._randoms[work.step] = self._run.random(work.step)
            codec = self._codec(work.step, note.shape)
            random = random_of(codec, self._randoms[work.step], work.step)
            if self._pipeline.differences and work.kind == "forward":
                before, codec_of = self._sent_before[work.chunk], partial(self._codec, work.step)
                data = before.encode(array, batch.indices.tolist(), codec_of, random)
            else:
                data = codec.encode(array.reshape(-1), random)
            self._send(target[0], f"{TAGS[work.kind]} {target[1]}", data, note)

    def _decoded(self, message: Message | None, work: PipelinePass, batch: MicroBatch) -> FlatArray | None:
        """The array that the message with the input of a pass encodes."""
        if message is None:
            return None
        note: StageNote = message.note
        if self._pipeline.differences and work.kind == "forward":
            before, codec_of = self._received_before[work.chunk], partial(self._codec, work.step)
            return before.decode(message.payload, note.shape, note.dtype, batch.indices.tolist(), codec_of)
        found = self._codec(work.step, note.shape).decode(message.payload, math.prod(note.shape), note.dtype)
        return found.reshape(note.shape)

    def _codec(self, step: int, shape: Shape) -> Codec:
        """The codec of an array of this shape, as its sender and its receiver use it."""
        return bound_codec(self._pipeline.codec, NoFeedback(), (shape,), step)

    def _microbatch(self, work: PipelinePass) -> MicroBatch:
        """The samples of a pass; the batch is drawn when the first pass needs it."""
        while self._drawn <= work.step:
            indices, step, count = self._run.batch(), self._drawn, self._pipeline.microbatches
            check_microbatches(count, len(indices))
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
