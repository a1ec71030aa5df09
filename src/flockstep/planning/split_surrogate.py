"""Split models for rehearsals: the sizes and the work of their parts, and surrogates of them, which compute nothing and
send messages of the real sizes.

A model is cut into stages from its layers alone, so that reference models can be planned too. Which layers can be split
over ways, and which parameters are gathered together, is known only after a run's own split of a job's model.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from flockstep.arrays.schema import Entry, FlatArray, Schema
from flockstep.codecs.base import Shape
from flockstep.codecs.identity import Identity
from flockstep.collectives.ring import Ring
from flockstep.costs.layers import Layer
from flockstep.costs.stages import Chain, chunks
from flockstep.errors import ConfigurationError
from flockstep.partitions.base import Partition
from flockstep.partitions.pipeline import Pipeline, check_microbatches
from flockstep.partitions.pipeline_schedules import OneForwardOneBackward
from flockstep.partitions.sharded import Sharded, ShardedParts
from flockstep.partitions.split_facts import SplitFacts
from flockstep.partitions.tensor import Product, TensorParallel
from flockstep.planning.job_profile import JobProfile
from flockstep.planning.surrogate import SurrogateEngine, elements_in
from flockstep.runtime.part_group import PartGroup, groups_of
from flockstep.split.shards import ModelShard, ShardedModel, ShardedPartsModel
from flockstep.split.splitting import make_split
from flockstep.split.stages import HeldPart, MicroBatch, ModelPart, PassShares, PipelineModel, SplitModel
from flockstep.split.ways import BlockOutputs, BlockShares, ModelWay, TensorModel, WayWeights

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
        case TensorParallel() | Product():
            return _ways(task, partition)
        case Sharded():
            return _shards(task, partition)
        case ShardedParts():
            return _sharded_parts(task, partition)
    raise ConfigurationError(
        f"a plan of split models predicts pipeline, tensor, pipeline * tensor, sharded and each of them * sharded, got "
        f"{partition}; use one of them, leave it out for whole replicas, or run flockstep simulate with this partition"
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


def _one_tensor(engine: SurrogateEngine, size: int) -> Schema:
    """Schema of a surrogate's part that counts as one tensor."""
    return Schema(engine.schema.dtype, (Entry("part", (size,), 0),))


class _SurrogateHeld(HeldPart):
    """Base class of the surrogates of all parts, which have elements of an engine's flat array, and no buffers."""

    def __init__(self, engine: SurrogateEngine, schema: Schema, span: slice):
        """`span`: the elements of the part in the flat array of `engine`."""
        self.schema = schema
        self.held_bytes = schema.nbytes
        self.train_size = engine.train_size
        self._engine, self._span = engine, span
        self._kept: dict[tuple[int, int, int, int], FlatArray] = {}
        """Replica, step, micro-batch and chunk → parameters of a forward pass whose backward pass is not complete."""

    @property
    def kept(self) -> int:
        return len(self._kept)

    def values(self) -> npt.NDArray[np.uint8]:
        return self.initial().view(np.uint8)

    def take(self, values: npt.NDArray[np.uint8]) -> FlatArray:
        params: FlatArray = values.copy().view(self.schema.dtype)
        return params

    def initial(self) -> FlatArray:
        return self._engine.initial()[self._span]

    def keep(self, chunk: int, batch: MicroBatch, params: FlatArray) -> None:
        """Begin a pass over a chunk with the given parameters (K,)."""
        self._kept[batch.replica, batch.step, batch.number, chunk] = params

    def weight_backward(self, chunk: int, batch: MicroBatch, out: FlatArray) -> None:
        """End a pass over a chunk; the pass over chunk 0 adds the gradient of all parameters to `out` (K + B,)."""
        params = self._kept.pop((batch.replica, batch.step, batch.number, chunk))
        if chunk == 0:
            out[: self.schema.size] += batch.share * self._engine.slopes[self._span] * params

    def activations(self, elements: float, batch: MicroBatch) -> FlatArray | None:
        """Return an array that stands for activations of `elements` elements per sample, or for their gradients; None
        if there are none.
        """
        return self.array(elements, batch) if elements else None

    def array(self, elements: float, batch: MicroBatch) -> FlatArray:
        """Return an array that stands for `elements` elements per sample."""
        count = round(elements * len(batch.indices) / self._engine.factor)
        return np.full(max(1, count), 1e-3, self._engine.schema.dtype)


class SurrogatePart(_SurrogateHeld, ModelPart):
    """A part of a pipeline, or a unit of a model in shards: its passes send arrays with the sizes of activations, and
    return the surrogate's gradient.
    """

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

    def forward(
        self, chunk: int, params: FlatArray, batch: MicroBatch, inputs: FlatArray | None
    ) -> tuple[FlatArray | None, float]:
        self.keep(chunk, batch, params)
        return self.activations(self._sends[chunk][0], batch), 0.0

    def backward(
        self, chunk: int, batch: MicroBatch, errors: FlatArray | None, out: FlatArray | None
    ) -> FlatArray | None:
        if out is not None:
            self.weight_backward(chunk, batch, out)
        return self.activations(self._sends[chunk][1], batch)


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
        for stage, ways in enumerate(self.stages):
            chunks = self.outputs[stage :: self.pipeline.stages]
            summed = [sum(one.forward + one.divided for one in chunk) for chunk in chunks]
            copied, divided = sum(way.copied for way in ways), sum(way.divided for way in ways)
            for way in ways:
                part = len(held)
                arrays = 2 + slots + self.partition.copies(part)
                own = elements_in(way.tensors) * arrays + copied + divided - way.divided
                outputs = max(
                    sum(one.holds for one in shares) + size for shares, size in zip(way.shares, summed, strict=True)
                )
                held.append(own + self.partition.batches_held(part) * self.batch * outputs)
        return max(held)

    def model(self, engine: SurrogateEngine) -> TensorModel:
        groups = _groups(engine, [len(way.tensors) for way in self.ways])
        parts = tuple(SurrogateWay(engine, self, group) for group in groups)
        facts = _facts(len(self.outputs))
        every_sample_known = replace(self.pipeline, differences=False)
        return TensorModel(engine, parts, self.layers, facts, self.partition, every_sample_known, self.tensor, 0)


def _ways(task: JobProfile, partition: TensorParallel | Product) -> WaysShape:
    """The model of a task with its layers split over ways, as a run splits it."""
    if task.job is None:
        raise ConfigurationError(
            f"the layers of {task.name} that can be split over ways are known only for a job; plan for a job, or use a "
            "pipeline"
        )

    def described(model: SplitModel) -> WaysShape:
        assert isinstance(model, TensorModel)
        ways = []
        for number, part in enumerate(model.parts):
            lent = part.divided_parameters[number % model.tensor.ways] if part.divided_parameters else slice(0, 0)
            ways.append(
                WayShape(
                    tuple(entry.shape for entry in part.schema.entries),
                    len(part.copied(part.initial())),
                    lent.stop - lent.start,
                    tuple(map(tuple, part.shares)),
                )
            )
        outputs = tuple(map(tuple, model.outputs))
        return WaysShape(partition, task.batch, model.layers, model.pipeline, model.tensor, tuple(ways), outputs)

    if isinstance(partition, Product):
        check_microbatches(partition.pipeline.microbatches, task.batch)
        usual = Product(_usual(partition.pipeline), replace(partition.tensor, collective=Ring()))
        known = _as_run(task, usual, described)
        return replace(known, partition=partition, pipeline=partition.pipeline, tensor=partition.tensor)
    known = _as_run(task, replace(partition, collective=Ring()), described)
    return replace(known, partition=partition, tensor=partition)


class SurrogateWay(_SurrogateHeld, ModelWay):
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
        self._copied = round(self.schema.size * way.copied / elements_in(way.tensors))
        if any(one.divided for one in self._outputs(0)):
            own, whole = group.part % shape.tensor.ways, elements_in(shape.tensors)
            sizes = [round(engine.schema.size * one.divided / whole) for one in shape.stages[self._stage]]
            lent = [0 if one == own else size for one, size in enumerate(sizes)]
            ends = list(accumulate(lent, initial=self.schema.size))
            spans = [slice(start, stop) for start, stop in pairwise(ends)]
            self.divided_parameters = [*spans[:own], slice(0, sizes[own]), *spans[own + 1 :]]
            self.borrowed = sum(lent)

    def copied(self, params: FlatArray) -> FlatArray:
        return params[len(params) - self._copied :]

    def divided(self, weights: WayWeights, batch: MicroBatch) -> FlatArray:
        return self.array(self._outputs(0)[0].divided, batch)

    def forward(
        self, chunk: int, block: int, weights: WayWeights, batch: MicroBatch, given: FlatArray | None
    ) -> tuple[FlatArray | None, float]:
        if not block:
            self.keep(chunk, batch, weights.own)
        return self.activations(self._outputs(chunk)[block].forward, batch), 0.0

    def backward(
        self, chunk: int, block: int, batch: MicroBatch, errors: FlatArray | None, out: FlatArray | None
    ) -> FlatArray | None:
        if out is not None and block == len(self._outputs(chunk)) - 1:  # its batch is never a way's share
            self.weight_backward(chunk, batch, out)
        return self.activations(self._outputs(chunk)[block].backward, batch)

    def _outputs(self, chunk: int) -> tuple[BlockOutputs, ...]:
        return self._shape.outputs[chunk * self._shape.pipeline.stages + self._stage]


@dataclass(frozen=True)
class ShardsShape(SplitShape):
    """A model whose parameters are stored in shards."""

    partition: Sharded
    units: tuple[int, ...]
    """Number of parameters of each unit."""
    shares: tuple[PassShares, ...]
    """Work of the passes of each unit."""
    outputs: float
    """Number of elements of the outputs of all layers for one sample, which the backward pass needs."""

    @property
    def tensors(self) -> tuple[Shape, ...]:
        return tuple((sum(one.stop - one.start for one in spans),) for spans in self.spans(self.units))

    def spans(self, units: Sequence[int]) -> list[list[slice]]:
        """Return for each way the elements of its shard in each unit, for units of the given numbers of elements."""
        ways, share = self.partition.ways, self.partition.collective.share
        return [[share(ways, size, way) for size in units] for way in range(ways)]

    def passed(self) -> Sequence[float]:
        return ()

    def elements_held(self, slots: int) -> float:
        stored = max(shape[0] for shape in self.tensors) * (2 + slots + self.partition.copies(0))
        return stored + TRANSIENT * max(self.units) + self.partition.batches_held(0) * self.batch * self.outputs

    def model(self, engine: SurrogateEngine) -> ShardedModel:
        """Return the surrogate in shards; its units divide the elements of `engine` as the model's units do."""
        whole, size = sum(self.units), engine.schema.size
        ends = [round(size * end / whole) for end in accumulate(self.units)]
        units = tuple(
            SurrogatePart(engine, _one_tensor(engine, stop - start), slice(start, stop), [share], [(0.0, 0.0)])
            for (start, stop), share in zip(pairwise([0, *ends]), self.shares, strict=True)
        )
        spans = self.spans([unit.schema.size for unit in units])
        parts = tuple(
            ModelShard(_one_tensor(engine, sum(span.stop - span.start for span in own)), engine.train_size, units, own)
            for own in spans
        )
        facts, pipeline = _facts(len(units)), Pipeline(len(units), microbatches=self.partition.ways)
        inner = PipelineModel(engine, units, self.layers, facts, pipeline, pipeline)
        return ShardedModel(engine, parts, self.layers, facts, self.partition, inner)


@dataclass(frozen=True)
class ShardedPartsShape(SplitShape):
    """A split model whose parts are each stored in shards."""

    partition: ShardedParts
    inner: SplitShape
    """The model in whole parts; a batch has the samples of one shard."""
    largest: int
    """Largest number of parameters of a shard."""

    @property
    def tensors(self) -> tuple[Shape, ...]:
        return self.inner.tensors

    def passed(self) -> Sequence[float]:
        return self.inner.passed()

    def elements_held(self, slots: int) -> float:
        """Return the number of elements in the memory of the worker that needs the most: a shard of the parameters,
        the gradient and the optimizer's arrays; and the part's gradient, copies and activations.
        """
        return (2 + slots) * self.largest + self.inner.elements_held(-1)

    def model(self, engine: SurrogateEngine) -> ShardedPartsModel:
        inner, sharded = self.inner.model(engine), self.partition.sharded
        held = [
            (part, sharded.collective.share(sharded.ways, part.schema.size, shard))
            for part in inner.parts
            for shard in range(sharded.ways)
        ]
        parts = tuple(
            ModelShard(_one_tensor(engine, span.stop - span.start), engine.train_size, [part], [span])
            for part, span in held
        )
        return ShardedPartsModel(engine, parts, self.layers, inner.facts, self.partition, inner)


def _shards(task: JobProfile, partition: Sharded) -> ShardsShape:
    """The model of a task in shards, as a run stores it."""
    if task.job is None or task.shape is None:
        raise ConfigurationError(
            f"the layers of {task.name} whose parameters are gathered together are known only for a job; plan for a "
            "job, or use a pipeline"
        )
    outputs = float(sum(layer.writes for layer in task.shape.layers))

    def described(model: SplitModel) -> ShardsShape:
        assert isinstance(model, ShardedModel)
        shares = tuple(unit.shares[0] for unit in model.inner.parts)
        return ShardsShape(partition, task.batch, model.layers, model.inner.sizes, shares, outputs)

    return _as_run(task, partition, described)


def _sharded_parts(task: JobProfile, partition: ShardedParts) -> ShardedPartsShape:
    """The model of a task in sharded parts, as a run stores it."""
    inner = split_shape(task, partition.inner)
    if task.job is None:
        raise ConfigurationError(
            f"whether the parts of {task.name} can be stored in shards is known only for a job; plan for a job, or use "
            f"{partition.inner}"
        )
    share = replace(inner, batch=task.batch // partition.sharded.ways)
    return _as_run(
        task,
        partition,
        lambda model: ShardedPartsShape(partition, task.batch, model.layers, share, max(model.sizes)),
    )
