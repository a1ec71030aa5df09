"""The surrogate of a split model for rehearsals: gradients are not computed, and messages have their real sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Shape
from flockstep.codecs.identity import Identity
from flockstep.costs.layers import Layer
from flockstep.costs.stages import Chain, chunks
from flockstep.drivers.part_group import PartGroup, groups_of
from flockstep.errors import ConfigurationError
from flockstep.feedback.nothing import NoFeedback
from flockstep.feedback.sender import bound_codec
from flockstep.frameworks.stages import MicroBatch, ModelPart, PassShares, PipelineModel
from flockstep.partitions.pipeline import Pipeline
from flockstep.partitions.pipeline_schedules.one_forward_one_backward import OneForwardOneBackward
from flockstep.partitions.split_facts import SplitFacts
from flockstep.planning.job_profile import JobProfile
from flockstep.planning.surrogate import SurrogateEngine

FINEST = 8
"""Smallest number of elements in a surrogate for the activations of a micro-batch, so that rounding to whole elements
has little effect.
"""
LARGEST = 65536
"""Largest number of parameters to which a surrogate is enlarged so that activations have `FINEST` elements."""


@dataclass(frozen=True)
class ChunkShape:
    """A chunk of a split model, that is, consecutive layers: the sizes of the layers, and the work of their passes."""

    first: str
    """Name of the first layer of the chunk."""
    tensors: tuple[Shape, ...]
    """Shapes of the chunk's trained tensors."""
    shares: PassShares
    sends: float
    """Number of elements per sample of the chunk's output, which is sent to the next chunk; 0 for the last chunk."""
    holds: float
    """Number of elements per sample of the outputs of all layers of the chunk, which the backward pass needs."""

    @property
    def parameters(self) -> int:
        """Number of trained parameters of the chunk."""
        return sum(map(math.prod, self.tensors))


@dataclass(frozen=True)
class SplitShape:
    """The shapes of a model that is cut into the parts of a pipeline, and the number of samples in a batch."""

    pipeline: Pipeline
    chunks: tuple[ChunkShape, ...]
    batch: int

    @property
    def parts(self) -> list[tuple[ChunkShape, ...]]:
        """The chunks of each part of the model, in the order in which the part computes the chunks."""
        return [self.chunks[part :: self.pipeline.stages] for part in range(self.pipeline.stages)]

    @property
    def tensors(self) -> tuple[Shape, ...]:
        """Shapes of all tensors of the model, part by part."""
        return tuple(shape for part in self.parts for chunk in part for shape in chunk.tensors)

    def elements(self, least: int) -> int:
        """Return the number of parameters of a surrogate: at least `least`, and more if activations would otherwise
        have only a few elements.
        """
        sends = [chunk.sends * self.batch / self.pipeline.microbatches for chunk in self.chunks if chunk.sends]
        whole = sum(chunk.parameters for chunk in self.chunks)
        return max(least, min(LARGEST, math.ceil(FINEST * whole / min(sends)))) if sends else least

    def activation_bytes(self, dtype: str) -> float:
        """Return the encoded bytes of the activations, and of the gradients of activations, that the workers of a
        replica send in a step.
        """
        samples = self.batch / self.pipeline.microbatches
        total = 0.0
        for chunk in self.chunks:
            if count := round(samples * chunk.sends):
                codec = bound_codec(self.pipeline.codec, NoFeedback(), ((count,),), 0)
                total += 2 * self.pipeline.microbatches * codec.wire_bytes(count, dtype)
        return total

    def model(self, engine: SurrogateEngine) -> PipelineModel:
        """Return the surrogate `engine`, with tensors in the shapes of this model, cut into the parts of the
        pipeline.
        """
        counts = [sum(len(chunk.tensors) for chunk in part) for part in self.parts]
        entries, sizes = list(engine.schema.entries), []
        for count in counts:
            sizes.append(sum(entry.size for entry in entries[:count]))
            del entries[:count]
        groups = groups_of(sizes, 0)
        parts = tuple(SurrogatePart(engine, self, group) for group in groups)
        facts = SplitFacts(tuple(range(len(self.chunks))), (), False, 0)
        return PipelineModel(engine, parts, tuple(part[0].first for part in self.parts), facts, self.pipeline)


def split_shape(task: JobProfile, pipeline: Pipeline) -> SplitShape:
    """Return the shapes of a task's model after `pipeline` has cut the model into parts.

    Raises:
        ConfigurationError: the layers of the model are unknown, or cannot be cut into these stages.
    """
    model = task.shape
    if model is None:
        raise ConfigurationError(
            f"the layers of {task.name} are not known, so that it cannot be cut into stages; use partition=none"
        )
    if task.batch < pipeline.microbatches:
        raise ConfigurationError(
            f"microbatches must be at most the {task.batch} samples of a batch, got {pipeline.microbatches}; use a "
            "larger batch or fewer micro-batches"
        )
    names = [str(name) for name in pipeline.split_at]
    found = chunks(model, pipeline.stages * pipeline.schedule.chunks, task.batch, names)
    tensors, total = _tensors(task, found), float(model.work(task.batch))
    shape = SplitShape(
        pipeline,
        tuple(
            ChunkShape(
                chunk[0].name,
                tensors[number],
                _shares(chunk, number, total, len(found), task.batch),
                float(chunk[-1].writes) if number < len(found) - 1 else 0.0,
                float(sum(layer.writes for layer in chunk)),
            )
            for number, chunk in enumerate(found)
        ),
        task.batch,
    )
    _require_cut(task, shape)
    return shape


def _require_cut(task: JobProfile, shape: SplitShape) -> None:
    """Check that a run can cut the model of the job, and cuts it in this way.

    Raises:
        ConfigurationError: a run refuses the model, or cuts it elsewhere.
    """
    if task.sizes_of_parts is None:
        return
    pipeline = shape.pipeline
    schedule = pipeline.schedule if pipeline.schedule.chunks > 1 else OneForwardOneBackward()
    count = min(pipeline.stages, pipeline.microbatches)  # one cut serves all numbers of micro-batches but 1
    found = task.sizes_of_parts(replace(pipeline, schedule=schedule, microbatches=count, codec=Identity()))
    planned = tuple(sum(chunk.parameters for chunk in part) for part in shape.parts)
    if found != planned:
        raise ConfigurationError(
            f"{pipeline} cuts {task.name} into parts of {', '.join(map(str, found))} parameters, but the parts of "
            f"its layers have {', '.join(map(str, planned))}, so that no plan can be made; use partition=none"
        )


def _tensors(task: JobProfile, found: Sequence[Chain]) -> list[tuple[Shape, ...]]:
    """Shapes of the tensors of each chunk: the task's own if they lie in the order of the layers."""
    left, result = list(task.tensors), []
    for chunk in found:
        count, mine = sum(layer.gradients for layer in chunk), list[Shape]()
        while left and sum(map(math.prod, mine)) < count:
            mine.append(left.pop(0))
        result.append(tuple(mine))
        if sum(map(math.prod, mine)) != count:
            return [((sum(layer.gradients for layer in each),),) for each in found]
    return result


def _shares(chunk: Sequence[Layer], number: int, total: float, count: int, batch: int) -> PassShares:
    """Work of the passes of a chunk, as `split_torch` divides it; the first has no gradient of its inputs."""
    if not total:
        return PassShares(*[1 / (3 * count)] * 3)
    by_input = sum(one.by_input.work(batch) for one in chunk) / total
    by_weight = sum(one.by_weight.work(batch) for one in chunk) / total
    forward = sum(one.work_forward(batch) for one in chunk) / total
    return PassShares(forward, by_input if number else 0.0, by_weight + (0.0 if number else by_input))


class SurrogatePart(ModelPart):
    """One part of a split model's surrogate. Its passes send arrays with the sizes of activations, and return the
    surrogate's gradient.
    """

    def __init__(self, engine: SurrogateEngine, shape: SplitShape, group: PartGroup):
        """`group`: the part, and its elements in the flat array of `engine`."""
        self.schema = group.schema(engine.schema)
        self.held_bytes = self.schema.nbytes
        self.train_size = engine.train_size
        self.shares = [chunk.shares for chunk in shape.parts[group.part]]
        self._engine, self._shape, self._part, self._span = engine, shape, group.part, group.span
        self._kept: dict[tuple[int, int, int, int], FlatArray] = {}

    @property
    def kept(self) -> int:
        return len(self._kept)

    def buffers(self, replica: int) -> FlatArray:
        return np.empty(0)

    def restore_buffers(self, replica: int, values: FlatArray) -> None:
        """Do nothing, because a surrogate has no buffers."""

    def values(self) -> npt.NDArray[np.uint8]:
        return self.initial().view(np.uint8)

    def take(self, values: npt.NDArray[np.uint8]) -> FlatArray:
        params: FlatArray = values.copy().view(self.schema.dtype)
        return params

    def initial(self) -> FlatArray:
        return self._engine.initial()[self._span]

    def forward(
        self, chunk: int, params: FlatArray, batch: MicroBatch, inputs: FlatArray | None
    ) -> tuple[FlatArray | None, float]:
        self._kept[self._key(chunk, batch)] = params
        return self._sent(self._number(chunk), batch), 0.0

    def backward(self, chunk: int, batch: MicroBatch, errors: FlatArray | None, out: FlatArray) -> FlatArray | None:
        self.weight_backward(chunk, batch, out)
        return self.input_backward(chunk, batch, errors)

    def input_backward(self, chunk: int, batch: MicroBatch, errors: FlatArray | None) -> FlatArray | None:
        return self._sent(self._number(chunk) - 1, batch)

    def weight_backward(self, chunk: int, batch: MicroBatch, out: FlatArray) -> None:
        params = self._kept.pop(self._key(chunk, batch))
        if chunk == 0:
            out += batch.share * self._engine.slopes[self._span] * params

    def _number(self, chunk: int) -> int:
        """Number in the model of a chunk of this part."""
        return chunk * self._shape.pipeline.stages + self._part

    def _sent(self, number: int, batch: MicroBatch) -> FlatArray | None:
        """The outputs of a chunk of the model for a micro-batch, or their gradient; None if the chunk is the last, or
        if there is none.
        """
        if number < 0 or number == len(self._shape.chunks) - 1:
            return None
        elements = len(batch.indices) * self._shape.chunks[number].sends / self._engine.factor
        return np.full(max(1, round(elements)), 1e-3, self._engine.schema.dtype)

    @staticmethod
    def _key(chunk: int, batch: MicroBatch) -> tuple[int, int, int, int]:
        return batch.replica, batch.step, batch.number, chunk
