"""The surrogate of a pipeline for rehearsals: gradients are not computed, and messages have their real sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Shape
from flockstep.codecs.identity import Identity
from flockstep.costs.layers import Layer
from flockstep.costs.stages import Chain, chunks
from flockstep.drivers.part_group import PartGroup
from flockstep.errors import ConfigurationError
from flockstep.frameworks.stages import MicroBatch, ModelPart, PassShares, PipelineModel
from flockstep.partitions.pipeline import Pipeline, check_microbatches
from flockstep.partitions.pipeline_schedules.one_forward_one_backward import OneForwardOneBackward
from flockstep.partitions.split_facts import SplitFacts
from flockstep.planning.job_profile import JobProfile
from flockstep.planning.split_shape import SplitShape, SurrogateHeld, groups_by_tensors
from flockstep.planning.surrogate import SurrogateEngine


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
class PipelineShape(SplitShape):
    """A model that is cut into the stages of a pipeline."""

    partition: Pipeline
    chunks: tuple[ChunkShape, ...]

    @property
    def parts(self) -> list[tuple[ChunkShape, ...]]:
        """The chunks of each part of the model, in the order in which the part computes the chunks."""
        return [self.chunks[part :: self.partition.stages] for part in range(self.partition.stages)]

    @property
    def tensors(self) -> tuple[Shape, ...]:
        return tuple(shape for part in self.parts for chunk in part for shape in chunk.tensors)

    def passed(self) -> Sequence[float]:
        return [chunk.sends * self.batch / self.partition.microbatches for chunk in self.chunks]

    def elements_held(self, slots: int) -> float:
        """Return the number of elements in the memory of the worker that needs the most. If a part has several chunks,
        the activations of its largest chunk are assumed for every micro-batch in flight.
        """
        return max(
            sum(chunk.parameters for chunk in chunks) * (2 + slots + self.partition.copies(part))
            + self.partition.batches_held(part) * self.batch * max(chunk.holds for chunk in chunks)
            for part, chunks in enumerate(self.parts)
        )

    def model(self, engine: SurrogateEngine) -> PipelineModel:
        counts = [sum(len(chunk.tensors) for chunk in part) for part in self.parts]
        parts = tuple(SurrogatePart(engine, self, group) for group in groups_by_tensors(engine, counts))
        facts = SplitFacts(tuple(range(len(self.chunks))), (), False, 0)
        every_sample_known = replace(self.partition, differences=False)
        return PipelineModel(engine, parts, self.layers, facts, every_sample_known, every_sample_known)


def pipeline_shape(task: JobProfile, pipeline: Pipeline) -> PipelineShape:
    """Return the model of a task as `pipeline` cuts it.

    Raises:
        ConfigurationError: the layers of the model are unknown, or cannot be cut into these stages.
    """
    model = task.shape
    if model is None:
        raise ConfigurationError(
            f"the layers of {task.name} are unknown, so its model cannot be cut into stages; use partition=none"
        )
    check_microbatches(pipeline.microbatches, task.batch)
    names = [str(name) for name in pipeline.split_at]
    found = chunks(model, pipeline.stages * pipeline.schedule.chunks, task.batch, names)
    tensors, total = _tensors(task, found), float(model.work(task.batch))
    shape = PipelineShape(
        pipeline,
        task.batch,
        tuple(chunk[0].name for chunk in found[: pipeline.stages]),
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
    )
    _require_cut(task, shape)
    return shape


def _require_cut(task: JobProfile, shape: PipelineShape) -> None:
    """Check that a run can cut the model of the job, and cuts it in this way.

    Raises:
        ConfigurationError: a run refuses the model, or cuts it elsewhere.
    """
    if task.sizes_of_parts is None:
        return
    pipeline = shape.partition
    schedule = pipeline.schedule if pipeline.schedule.chunks > 1 else OneForwardOneBackward()
    count = min(pipeline.stages, pipeline.microbatches)  # one cut serves all numbers of micro-batches but 1
    found = task.sizes_of_parts(
        replace(pipeline, schedule=schedule, microbatches=count, codec=Identity(), differences=False)
    )
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


class SurrogatePart(SurrogateHeld, ModelPart):
    """One part of a pipeline's surrogate. Its passes send arrays with the sizes of activations, and return the
    surrogate's gradient.
    """

    def __init__(self, engine: SurrogateEngine, shape: PipelineShape, group: PartGroup):
        """`group`: the part, and its elements in the flat array of `engine`."""
        super().__init__(engine, group.schema(engine.schema), group.span)
        self.shares = [chunk.shares for chunk in shape.parts[group.part]]
        self._shape, self._part = shape, group.part

    def forward(
        self, chunk: int, params: FlatArray, batch: MicroBatch, inputs: FlatArray | None
    ) -> tuple[FlatArray | None, float]:
        self.keep(chunk, batch, params)
        return self._sent(self._number(chunk), batch), 0.0

    def backward(self, chunk: int, batch: MicroBatch, errors: FlatArray | None, out: FlatArray) -> FlatArray | None:
        self.weight_backward(chunk, batch, out)
        return self.input_backward(chunk, batch, errors)

    def input_backward(self, chunk: int, batch: MicroBatch, errors: FlatArray | None) -> FlatArray | None:
        return self._sent(self._number(chunk) - 1, batch)

    def weight_backward(self, chunk: int, batch: MicroBatch, out: FlatArray) -> None:
        self.add_gradient(chunk, batch, out)

    def _number(self, chunk: int) -> int:
        """Number in the model of a chunk of this part."""
        return chunk * self._shape.partition.stages + self._part

    def _sent(self, number: int, batch: MicroBatch) -> FlatArray | None:
        """The outputs of a chunk of the model for a micro-batch, or their gradient; None if the chunk is the last, or
        if there is none.
        """
        if number < 0 or number == len(self._shape.chunks) - 1:
            return None
        return self.activations(len(batch.indices) * self._shape.chunks[number].sends)
