"""The surrogate of a model whose layers are split over ways, for rehearsals.

The blocks, their work and the sizes of the sums are those of the job's model, split as a run splits it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise

from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Shape
from flockstep.codecs.identity import Identity
from flockstep.collectives.ring import Ring
from flockstep.drivers.part_group import PartGroup
from flockstep.errors import ConfigurationError
from flockstep.frameworks.job import make_split
from flockstep.frameworks.stages import MicroBatch, SplitModel
from flockstep.frameworks.ways import BlockOutputs, BlockShares, ModelWay, TensorModel, WayWeights
from flockstep.partitions.pipeline import Pipeline, check_microbatches
from flockstep.partitions.pipeline_schedules.one_forward_one_backward import OneForwardOneBackward
from flockstep.partitions.split_facts import SplitFacts
from flockstep.partitions.tensor import Product, TensorParallel
from flockstep.planning.job_profile import JobProfile
from flockstep.planning.split_shape import SplitShape, SurrogateHeld, groups_by_tensors
from flockstep.planning.surrogate import SurrogateEngine


@dataclass(frozen=True)
class WayShape:
    """The part of a split model that one way (one worker of a stage) holds and computes."""

    tensors: tuple[Shape, ...]
    """Shapes of the trained tensors; tensors that the other ways copy come last."""
    copied: int
    """Number of elements of this way's parameters that the other ways copy."""
    divided: int
    """Number of elements that belong to divided layers; they come first among those that other ways copy."""
    shares: tuple[tuple[BlockShares, ...], ...]
    """Work of each block of each chunk of the stage."""

    @property
    def parameters(self) -> int:
        """Number of trained parameters that the way holds."""
        return sum(map(math.prod, self.tensors))


@dataclass(frozen=True)
class WaysShape(SplitShape):
    """A model whose layers are split over ways, in one or several stages."""

    partition: TensorParallel | Product
    pipeline: Pipeline
    tensor: TensorParallel
    ways: tuple[WayShape, ...]
    """The ways of all stages, in order of parts."""
    outputs: tuple[tuple[BlockOutputs, ...], ...]
    """Outputs of each block of each chunk of the model."""

    @property
    def tensors(self) -> tuple[Shape, ...]:
        return tuple(shape for way in self.ways for shape in way.tensors)

    @property
    def stages(self) -> list[tuple[WayShape, ...]]:
        """The ways of each stage."""
        count = self.tensor.ways
        return [self.ways[first : first + count] for first in range(0, len(self.ways), count)]

    def passed(self) -> Sequence[float]:
        samples = self.batch / self.pipeline.microbatches
        sizes = [(one.forward, one.backward, one.divided) for one in chain(*self.outputs)]
        return [samples * size for size in chain(*sizes)]

    def elements_held(self, slots: int) -> float:
        held: list[float] = []
        for stage in self.stages:
            copied, divided = sum(way.copied for way in stage), sum(way.divided for way in stage)
            for way in stage:
                part = len(held)
                own = way.parameters * (2 + slots + self.partition.copies(part)) + copied + divided - way.divided
                outputs = max(
                    sum(one.holds for one in shares)
                    + sum(
                        one.forward + one.divided
                        for one in self.outputs[number * self.pipeline.stages + part // len(stage)]
                    )
                    for number, shares in enumerate(way.shares)
                )
                held.append(own + self.partition.batches_held(part) * self.batch * outputs)
        return max(held)

    def model(self, engine: SurrogateEngine) -> TensorModel:
        groups = groups_by_tensors(engine, [len(way.tensors) for way in self.ways])
        parts = tuple(SurrogateWay(engine, self, group) for group in groups)
        facts = SplitFacts(tuple(range(len(self.outputs))), (), False, 0)
        every_sample_known = replace(self.pipeline, differences=False)
        return TensorModel(engine, parts, self.layers, facts, self.partition, every_sample_known, self.tensor, 0)


def ways_shape(task: JobProfile, partition: TensorParallel | Product) -> WaysShape:
    """Return the model of a task with its layers split over ways.

    Raises:
        ConfigurationError: there is no job, or a run refuses to split its model.
    """
    if task.job is None:
        raise ConfigurationError(
            f"the layers of {task.name} that can be split over ways are known only for a job; plan for a job, or use a "
            "pipeline"
        )
    if isinstance(partition, Product):
        check_microbatches(partition.pipeline.microbatches, task.batch)
    usual = _usual(partition)
    if usual not in task.splits:
        task.splits[usual] = _shape_of(make_split(task.job(0), 0, usual), usual, task.batch)
    known = task.splits[usual]
    assert isinstance(known, WaysShape)
    pipeline, tensor = (
        (partition.pipeline, partition.tensor) if isinstance(partition, Product) else (known.pipeline, partition)
    )
    return replace(known, partition=partition, pipeline=pipeline, tensor=tensor)


def _usual(partition: TensorParallel | Product) -> TensorParallel | Product:
    """The partition that divides a model in the same way, with the usual settings for everything else."""
    if isinstance(partition, TensorParallel):
        return replace(partition, collective=Ring())
    pipeline = partition.pipeline
    count = min(pipeline.stages, pipeline.microbatches)
    schedule = pipeline.schedule if pipeline.schedule.chunks > 1 else OneForwardOneBackward()
    usual = replace(pipeline, schedule=schedule, microbatches=count, codec=Identity(), differences=False)
    return Product(usual, replace(partition.tensor, collective=Ring()))


def _shape_of(model: SplitModel, partition: TensorParallel | Product, batch: int) -> WaysShape:
    """The sizes and the work of a model that has been split."""
    assert isinstance(model, TensorModel)
    ways = [
        WayShape(
            tuple(entry.shape for entry in part.schema.entries),
            len(part.copied(part.initial())),
            _divided(part, number % model.tensor.ways),
            tuple(map(tuple, part.shares)),
        )
        for number, part in enumerate(model.parts)
    ]
    outputs = tuple(map(tuple, model.outputs))
    return WaysShape(partition, batch, model.layers, model.pipeline, model.tensor, tuple(ways), outputs)


def _divided(part: ModelWay, way: int) -> int:
    """Number of elements of the parameters of divided layers that a way trains."""
    return part.divided_parameters[way].stop - part.divided_parameters[way].start if part.divided_parameters else 0


class SurrogateWay(SurrogateHeld, ModelWay):
    """One way of a stage of a surrogate: its passes return arrays with the sizes of sums and of activations, and add
    the surrogate's gradient.
    """

    def __init__(self, engine: SurrogateEngine, shape: WaysShape, group: PartGroup):
        """`group`: the part, and its elements in the flat array of `engine`."""
        super().__init__(engine, group.schema(engine.schema), group.span)
        self._shape, self._stage = shape, group.part // shape.tensor.ways
        way = shape.ways[group.part]
        self.shares = way.shares
        self.copies = any(one.copied for one in shape.stages[self._stage])
        self._copied = round(self.schema.size * way.copied / way.parameters)
        if any(one.divided for one in self._outputs(0)):
            own = group.part % shape.tensor.ways
            sizes = [round(engine.schema.size * one.divided / shape.parameters) for one in shape.stages[self._stage]]
            lent = [0 if one == own else size for one, size in enumerate(sizes)]
            ends = list(accumulate(lent, initial=self.schema.size))
            spans = [slice(start, stop) for start, stop in pairwise(ends)]
            self.divided_parameters = [*spans[:own], slice(0, sizes[own]), *spans[own + 1 :]]
            self.borrowed = sum(lent)

    def copied(self, params: FlatArray) -> FlatArray:
        return params[len(params) - self._copied :]

    def divided(self, weights: WayWeights, batch: MicroBatch) -> FlatArray:
        return self.activations(self._outputs(0)[0].divided * len(batch.indices))

    def forward(
        self, chunk: int, block: int, weights: WayWeights, batch: MicroBatch, given: FlatArray | None
    ) -> tuple[FlatArray | None, float]:
        if not block:
            self.keep(chunk, batch, weights.own)
        return self._array(self._outputs(chunk)[block].forward, batch), 0.0

    def backward(
        self, chunk: int, block: int, batch: MicroBatch, errors: FlatArray | None, out: FlatArray
    ) -> FlatArray | None:
        if block == len(self._outputs(chunk)) - 1:  # its batch is never a way's share
            self.weight_backward(chunk, batch, out)
        return self.input_backward(chunk, block, batch, errors)

    def input_backward(self, chunk: int, block: int, batch: MicroBatch, errors: FlatArray | None) -> FlatArray | None:
        return self._array(self._outputs(chunk)[block].backward, batch)

    def weight_backward(self, chunk: int, batch: MicroBatch, out: FlatArray) -> None:
        self.add_gradient(chunk, batch, out[: self.schema.size])

    def _outputs(self, chunk: int) -> tuple[BlockOutputs, ...]:
        return self._shape.outputs[chunk * self._shape.pipeline.stages + self._stage]

    def _array(self, elements: float, batch: MicroBatch) -> FlatArray | None:
        return self.activations(elements * len(batch.indices)) if elements else None
