"""The surrogates of models whose parameters, or whose parts, are stored in shards, for rehearsals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from flockstep.arrays.schema import Entry, FlatArray, Schema
from flockstep.codecs.base import Shape
from flockstep.errors import ConfigurationError
from flockstep.frameworks.job import make_split
from flockstep.frameworks.shards import ModelShard, ShardedModel, ShardedPartsModel
from flockstep.frameworks.stages import MicroBatch, ModelPart, PassShares
from flockstep.partitions.sharded import Sharded, ShardedParts
from flockstep.partitions.split_facts import SplitFacts
from flockstep.planning.job_profile import JobProfile
from flockstep.planning.split_shape import SplitShape, SurrogateHeld
from flockstep.planning.surrogate import SurrogateEngine

TRANSIENT = 3
"""Number of arrays of a unit's size while the unit is computed: the gathered parameters, the weights, the gradient."""


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
            SurrogateUnit(engine, start, stop, share)
            for (start, stop), share in zip(pairwise([0, *ends]), self.shares, strict=True)
        )
        spans = self.spans([unit.schema.size for unit in units])
        parts = tuple(
            ModelShard(_one_tensor(engine, sum(span.stop - span.start for span in own)), engine.train_size, units, own)
            for own in spans
        )
        facts = SplitFacts(tuple(range(len(units))), (), False, 0)
        return ShardedModel(engine, parts, self.layers, facts, self.partition, units, ())


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


class SurrogateUnit(SurrogateHeld, ModelPart):
    """A unit of a surrogate: its passes return nothing, and add the surrogate's gradient."""

    def __init__(self, engine: SurrogateEngine, start: int, stop: int, shares: PassShares):
        """`start` and `stop`: the elements of the unit in the flat array of `engine`."""
        super().__init__(engine, _one_tensor(engine, stop - start), slice(start, stop))
        self.shares = [shares]

    def forward(
        self, chunk: int, params: FlatArray, batch: MicroBatch, inputs: FlatArray | None
    ) -> tuple[FlatArray | None, float]:
        self.keep(chunk, batch, params)
        return None, 0.0

    def backward(self, chunk: int, batch: MicroBatch, errors: FlatArray | None, out: FlatArray) -> FlatArray | None:
        self.add_gradient(chunk, batch, out)
        return None


def _one_tensor(engine: SurrogateEngine, size: int) -> Schema:
    """Schema of a surrogate's part that counts as one tensor."""
    return Schema(engine.schema.dtype, (Entry("part", (size,), 0),))


def shards_shape(task: JobProfile, partition: Sharded) -> ShardsShape:
    """Return the model of a task in shards.

    Raises:
        ConfigurationError: there is no job, or a run refuses to shard its model.
    """
    if task.job is None or task.shape is None:
        raise ConfigurationError(
            f"the layers of {task.name} whose parameters are gathered together are known only for a job; plan for a "
            "job, or use a pipeline"
        )
    if partition not in task.splits:
        model = make_split(task.job(0), 0, partition)
        assert isinstance(model, ShardedModel)
        task.splits[partition] = ShardsShape(
            partition,
            task.batch,
            model.layers,
            tuple(unit.schema.size for unit in model.units),
            tuple(unit.shares[0] for unit in model.units),
            float(sum(layer.writes for layer in task.shape.layers)),
        )
    known = task.splits[partition]
    assert isinstance(known, ShardsShape)
    return known


def sharded_parts_shape(task: JobProfile, partition: ShardedParts, inner: SplitShape) -> ShardedPartsShape:
    """Return the model of a task in sharded parts; `inner` is the model in whole parts.

    Raises:
        ConfigurationError: there is no job, or a run refuses to shard the parts of its model.
    """
    if task.job is None:
        raise ConfigurationError(
            f"whether the parts of {task.name} can be stored in shards is known only for a job; plan for a job, or use "
            f"{partition.inner}"
        )
    if partition not in task.splits:
        model = make_split(task.job(0), 0, partition)
        share = replace(inner, batch=task.batch // partition.sharded.ways)
        task.splits[partition] = ShardedPartsShape(partition, task.batch, model.layers, share, max(model.sizes))
    known = task.splits[partition]
    assert isinstance(known, ShardedPartsShape)
    return known
