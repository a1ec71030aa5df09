"""Split models for rehearsals: the sizes and the work of their parts, and surrogates of them, which compute nothing and
send messages of the real sizes.

A model is cut into stages from its layers alone, so that reference models can be planned too. How PyTorch
divides a model is known only after a run's own division of a job's model.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from flockstep.arrays.schema import FlatArray, Schema
from flockstep.codecs.base import Shape
from flockstep.codecs.identity import Identity
from flockstep.costs.layers import Layer
from flockstep.costs.stages import Chain, chunks
from flockstep.errors import ConfigurationError
from flockstep.partitions.base import JointPartition, Partition
from flockstep.partitions.pipeline import Pipeline, check_microbatches
from flockstep.partitions.pipeline_schedules import OneForwardOneBackward
from flockstep.partitions.split_facts import SplitFacts
from flockstep.planning.job_profile import JobProfile
from flockstep.planning.surrogate import SurrogateEngine, elements_in
from flockstep.runtime.part_group import PartGroup, groups_of
from flockstep.split.joint import JointModel, Timeline, WayExchange
from flockstep.split.splitting import make_split
from flockstep.split.stages import HeldPart, MicroBatch, ModelPart, PassShares, PipelineModel, SplitModel

FINEST = 8
"""Smallest number of elements in a surrogate for the activations of a micro-batch, so that rounding to whole elements
has little effect.
"""
LARGEST = 65536
"""Largest number of parameters to which a surrogate is enlarged so that activations have `FINEST` elements."""
SLIGHT = 16
"""Factor by which an array between parts must be smaller than the largest such array to be exempt from `FINEST`."""


TRANSIENT = 3
"""Number of arrays of a unit's size while the unit is computed: the gathered parameters, the weights, the gradient."""

T = TypeVar("T")


@dataclass(frozen=True)
class SplitShape(ABC):
    """A model that is split by a partition, together with the number of samples in a batch."""

    partition: Partition
    batch: int
    layers: tuple[str, ...]
    """The layers of each part, as text."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Shape, ...]:
        """Shapes of all tensors, part by part."""

    @abstractmethod
    def passed(self) -> Sequence[float]:
        """Return the number of elements of each array of activations between parts, for one micro-batch."""

    @abstractmethod
    def elements_held(self, slots: int) -> float:
        """Return the number of elements in the memory of the worker that needs the most: parameters, their copies,
        gradient, `slots` arrays of the optimizer, and activations.
        """

    @abstractmethod
    def model(self, engine: SurrogateEngine) -> SplitModel:
        """Return the surrogate `engine`, whose tensors have the shapes of this model, in parts."""

    def elements(self, least: int) -> int:
        """Return the number of parameters of the surrogate that stands for this model in rehearsals: at least `least`,
        and more if activations would otherwise have only a few elements.
        """
        sizes = [one for one in self.passed() if one]
        smallest = min((one for one in sizes if SLIGHT * one >= max(sizes)), default=0.0)
        return max(least, min(LARGEST, math.ceil(FINEST * elements_in(self.tensors) / smallest))) if smallest else least


def split_shape(task: JobProfile, partition: Partition) -> SplitShape:
    """Return the model of a task as `partition` splits it.

    Raises:
        ConfigurationError: the layers of the model are unknown, the model cannot be split in this way, or plans do not
            predict the partition.
    """
    match partition:
        case Pipeline():
            return _stages(task, partition)
        case JointPartition():
            return _joint(task, partition)
    raise ConfigurationError(
        f"a plan of split models predicts pipeline, tensor and sharded, got {partition}; use one of them, leave it out "
        "for whole replicas, or run flockstep simulate with this partition"
    )


def _as_run(task: JobProfile, partition: Partition, described: Callable[[SplitModel], T]) -> T:
    """What `described` says of the model of a job as a run splits it. A run may refuse to split the model; a partition
    is split only once.
    """
    if partition not in task.splits:
        assert task.job is not None
        task.splits[partition] = described(make_split(task.job(0), 0, partition))
    known: T = task.splits[partition]
    return known


def _usual(pipeline: Pipeline) -> Pipeline:
    """The pipeline that cuts a model in the same places, with the usual settings for everything else."""
    schedule = pipeline.schedule if pipeline.schedule.chunks > 1 else OneForwardOneBackward()
    count = min(pipeline.stages, pipeline.microbatches)  # one cut serves all numbers of micro-batches but 1
    return replace(pipeline, schedule=schedule, microbatches=count, codec=Identity(), differences=False)


def _facts(chunk_count: int) -> SplitFacts:
    return SplitFacts(tuple(range(chunk_count)), (), False, 0)


def _groups(engine: SurrogateEngine, counts: Sequence[int]) -> list[PartGroup]:
    """The parts of a surrogate, each with the given number of the engine's tensors, in order."""
    entries, sizes = list(engine.schema.entries), []
    for count in counts:
        sizes.append(sum(entry.size for entry in entries[:count]))
        del entries[:count]
    return groups_of(sizes, 0)


class _SurrogateHeld(HeldPart):
    """Base class of the surrogates of all parts, which have elements of an engine's flat array, and no buffers."""

    def __init__(self, engine: SurrogateEngine, schema: Schema, span: slice):
        """`span`: the elements of the part in the flat array of `engine`."""
        self.schema = schema
        self.held_bytes = schema.nbytes
        self.train_size = engine.train_size
        self._engine, self._span = engine, span

    def initial(self) -> FlatArray:
        return self._engine.initial()[self._span]


class SurrogatePart(_SurrogateHeld, ModelPart):
    """A part of a pipeline, whose passes send arrays of the sizes of activations and return a surrogate's gradient."""

    def __init__(
        self,
        engine: SurrogateEngine,
        schema: Schema,
        span: slice,
        shares: Sequence[PassShares],
        sends: Sequence[tuple[float, float]],
    ):
        """`sends`: for each chunk, the numbers of elements per sample of its outputs and of its inputs, which other
        parts send or receive; 0 for none.
        """
        super().__init__(engine, schema, span)
        self.shares, self._sends = list(shares), sends
        self._kept: dict[tuple[int, int, int, int], FlatArray] = {}
        """Replica, step, micro-batch and chunk → parameters of a forward pass whose backward pass is not complete."""

    def forward(
        self, chunk: int, params: FlatArray, batch: MicroBatch, inputs: FlatArray | None
    ) -> tuple[FlatArray | None, float]:
        self._kept[batch.replica, batch.step, batch.number, chunk] = params
        return self._activations(self._sends[chunk][0], batch), 0.0

    def backward(
        self, chunk: int, batch: MicroBatch, errors: FlatArray | None, out: FlatArray | None
    ) -> FlatArray | None:
        if out is not None:
            self.weight_backward(chunk, batch, out)
        return self._activations(self._sends[chunk][1], batch)

    def weight_backward(self, chunk: int, batch: MicroBatch, out: FlatArray) -> None:
        """End a pass over a chunk; the pass over chunk 0 adds the gradient of all parameters to `out` (K + B,)."""
        params = self._kept.pop((batch.replica, batch.step, batch.number, chunk))
        if chunk == 0:
            out[: self.schema.size] += batch.share * self._engine.slopes[self._span] * params

    def _activations(self, elements: float, batch: MicroBatch) -> FlatArray | None:
        """An array that stands for activations of `elements` elements per sample, or for their gradients; None if there
        are none.
        """
        count = round(elements * len(batch.indices) / self._engine.factor)
        return np.full(max(1, count), 1e-3, self._engine.schema.dtype) if elements else None


@dataclass(frozen=True)
class ChunkShape:
    """A chunk of a split model, that is, consecutive layers: the sizes of the layers, and the work of their passes."""

    tensors: tuple[Shape, ...]
    """Shapes of the chunk's trained tensors."""
    shares: PassShares
    sends: float
    """Number of elements per sample of the chunk's output, which is sent to the next chunk; 0 for the last chunk."""
    holds: float
    """Number of elements per sample of the outputs of all layers of the chunk, which the backward pass needs."""


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
            sum(elements_in(chunk.tensors) for chunk in chunks) * (2 + slots + self.partition.copies(part))
            + self.partition.batches_held(part) * self.batch * max(chunk.holds for chunk in chunks)
            for part, chunks in enumerate(self.parts)
        )

    def model(self, engine: SurrogateEngine) -> PipelineModel:
        sent = [chunk.sends for chunk in self.chunks]
        sends = list(zip(sent, [0.0, *sent[:-1]], strict=True))
        groups = _groups(engine, [sum(len(chunk.tensors) for chunk in part) for part in self.parts])
        parts = tuple(
            SurrogatePart(
                engine,
                group.schema(engine.schema),
                group.span,
                [chunk.shares for chunk in own],
                sends[group.part :: self.partition.stages],
            )
            for group, own in zip(groups, self.parts, strict=True)
        )
        every_sample_known = replace(self.partition, differences=False)
        return PipelineModel(
            engine, parts, self.layers, _facts(len(self.chunks)), every_sample_known, every_sample_known
        )


def _stages(task: JobProfile, pipeline: Pipeline) -> PipelineShape:
    """The model of a task in stages; a run of the job must cut it in the same places."""
    model = task.shape
    if model is None:
        raise ConfigurationError(
            f"the layers of {task.name} are unknown, so its model cannot be cut into stages; use partition=none"
        )
    check_microbatches(pipeline.microbatches, task.batch)
    names = [str(name) for name in pipeline.split_at]
    found = chunks(model, pipeline.stages * pipeline.schedule.chunks, task.batch, names)
    tensors, total, last = _tensors(task, found), float(model.work(task.batch)), len(found) - 1
    shape = PipelineShape(
        pipeline,
        task.batch,
        tuple(chunk[0].name for chunk in found[: pipeline.stages]),
        tuple(
            ChunkShape(
                tensors[number],
                _shares(chunk, number, total, len(found), task.batch),
                float(chunk[-1].writes) if number < last else 0.0,
                float(sum(layer.writes for layer in chunk)),
            )
            for number, chunk in enumerate(found)
        ),
    )
    if task.job is not None:
        cut = _as_run(task, _usual(pipeline), lambda split: split.sizes)
        planned = tuple(sum(elements_in(chunk.tensors) for chunk in part) for part in shape.parts)
        if cut != planned:
            raise ConfigurationError(
                f"{pipeline} cuts {task.name} into parts of {', '.join(map(str, cut))} parameters, but the parts of "
                f"its layers have {', '.join(map(str, planned))}, so that no plan can be made; use partition=none"
            )
    return shape


def _tensors(task: JobProfile, found: Sequence[Chain]) -> list[tuple[Shape, ...]]:
    """Shapes of the tensors of each chunk: the task's own if they lie in the order of the layers."""
    left, result = list(task.tensors), []
    for chunk in found:
        count, mine = sum(layer.gradients for layer in chunk), list[Shape]()
        while left and elements_in(mine) < count:
            mine.append(left.pop(0))
        result.append(tuple(mine))
        if elements_in(mine) != count:
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


@dataclass(frozen=True)
class JointShape(SplitShape):
    """A model that PyTorch divides over the processes of a replica, as a run divides it."""

    partition: JointPartition
    held: tuple[tuple[Shape, ...], ...]
    """Shapes of the tensors that each process trains."""
    timeline: Timeline
    """What a process does for a batch."""
    itemsize: int

    @property
    def tensors(self) -> tuple[Shape, ...]:
        return tuple(shape for part in self.held for shape in part)

    def passed(self) -> Sequence[float]:
        return [size / self.itemsize for size in self._sizes("sum")]

    def elements_held(self, slots: int) -> float:
        stored = max(map(elements_in, self.held)) * (2 + slots + self.partition.copies(0))
        gathered = max(self._sizes("gather"), default=0.0)
        return stored + (TRANSIENT * gathered + self.timeline.saved_bytes) / self.itemsize

    def _sizes(self, kind: str) -> list[float]:
        return [one.nbytes for one in self.timeline.work if isinstance(one, WayExchange) and one.kind == kind]

    def model(self, engine: SurrogateEngine) -> JointModel:
        groups = _groups(engine, [len(one) for one in self.held])
        parts = tuple(_SurrogateHeld(engine, group.schema(engine.schema), group.span) for group in groups)
        work = tuple(
            replace(one, nbytes=one.nbytes / engine.factor) if isinstance(one, WayExchange) else one
            for one in self.timeline.work
        )
        return SurrogateJoint(
            engine, parts, self.layers, _facts(0), self.partition, known=replace(self.timeline, work=work)
        )


@dataclass(frozen=True, eq=False)
class SurrogateJoint(JointModel):
    """A surrogate whose replicas are divided over processes."""

    known: Timeline

    def timeline(self, samples: int) -> Timeline:
        return self.known


def _joint(task: JobProfile, partition: JointPartition) -> JointShape:
    """The model of a task as a run divides it over processes."""
    if task.job is None:
        raise ConfigurationError(
            f"how PyTorch divides the layers of {task.name} is known only for a job; plan for a job, or use a pipeline"
        )

    def described(model: SplitModel) -> JointShape:
        assert isinstance(model, JointModel)
        held = tuple(tuple(entry.shape for entry in part.schema.entries) for part in model.parts)
        itemsize = np.dtype(model.engine.schema.dtype).itemsize
        return JointShape(partition, task.batch, model.layers, held, model.timeline(task.batch), itemsize)

    return _as_run(task, partition, described)
