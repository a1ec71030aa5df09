"""A torch module whose parameters are stored in shards on several workers, and gathered one unit at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from flockstep.arrays.namespace import as_tensor
from flockstep.arrays.schema import Entry, FlatArray, Schema
from flockstep.errors import ConfigurationError
from flockstep.frameworks.base import Job
from flockstep.frameworks.torch import TorchEngine
from flockstep.partitions.base import Partition, check_samples
from flockstep.partitions.pipeline import Pipeline
from flockstep.partitions.pipeline_schedules import GPipe
from flockstep.partitions.sharded import Sharded, ShardedParts
from flockstep.partitions.split_facts import SplitFacts
from flockstep.split.shards import ModelShard, ShardedModel, ShardedPartsModel
from flockstep.split.stages import HeldPart, MicroBatch, PipelineModel, SplitModel
from flockstep.split.torch_blocks import of_all_samples
from flockstep.split.torch_chain import places_of
from flockstep.split.torch_stages import (
    PartsEngine,
    TorchPart,
    check_loss,
    cut_chain,
    difference_in_shares,
    engine_of,
    model_chain,
    stage_torch,
)


class TorchUnit(TorchPart):
    """A unit of a sharded torch module, whose parameters take memory only during a pass over its layers."""

    def forward(
        self, chunk: int, params: FlatArray, batch: MicroBatch, inputs: FlatArray | None
    ) -> tuple[FlatArray | None, float]:
        found = super().forward(chunk, params, batch, inputs)
        if self.engine.in_trial:  # until the backward pass, other units use the memory of the parameters
            self._overwritten = params, params.copy()
            params.fill(math.nan)
        return found

    def backward(
        self, chunk: int, batch: MicroBatch, errors: FlatArray | None, out: FlatArray | None
    ) -> FlatArray | None:
        if self.engine.in_trial:
            params, values = self._overwritten
            params[:] = values
        return super().backward(chunk, batch, errors, out)

    def _weights(self, chunk: int, params: FlatArray) -> list[torch.Tensor]:
        """New tensors for each pass, so that no tensor keeps its gradient in memory after the pass."""
        return [view.detach().to(dtype).requires_grad_() for view, dtype in self._places(chunk, as_tensor(params))]

    def _completes(self, chunk: int, batch: MicroBatch) -> bool:
        """Return true: the gradient of a unit travels behind the pass."""
        return True


def shard_torch(job: Job, seed: int, sharded: Sharded) -> ShardedModel:
    """Build the job's model, and divide the parameters of each of its layers among the ways, that is, the workers of a
    replica.

    The model is a chain of layers, as for a pipeline; a unit begins with each layer that has parameters of its own.
    Dropout draws from a stream for each replica, step, way and unit.

    Raises:
        ConfigurationError: the model has buffers that change in training, cannot be cut into units, or has fewer
            parameters than there are ways; a layer computes with statistics of all samples; a batch has fewer samples
            than there are ways; the loss is not the mean over samples.
    """
    whole, who = TorchEngine(job, seed), f"job {job.name!r}"
    if whole.changing_buffers:
        raise ConfigurationError(
            f"the ways of {sharded} compute different samples, so that buffers that change in training would differ "
            f"between them, got {next(iter(whole.changing_buffers))!r} of {who}; use layers without such buffers, such "
            "as group normalization in place of batch normalization, or partition=none"
        )
    check_samples("sharded", sharded.ways, job.batch)
    chain = model_chain(whole.module, who)
    for layer in chain:
        if (why := of_all_samples(layer, ())) is not None:
            raise _needs_all_samples(sharded, why, who)
    pipeline = Pipeline(len(places_of(chain, together=False)), GPipe(), sharded.ways)
    units = cut_chain(job, whole, chain, pipeline, TorchUnit, "partition=none")
    if why := difference_in_shares(units, sharded.ways):
        raise _needs_all_samples(sharded, why, who)
    return _sharded(units, sharded, who)


def _needs_all_samples(sharded: Sharded, got: str, who: str) -> ConfigurationError:
    return ConfigurationError(
        f"the ways of {sharded} compute different samples, so that layers must compute each sample on its own, got "
        f"{got} of {who}; use for example nn.GroupNorm, or partition=none"
    )


def shards_without_values(job: Job, seed: int, sharded: Sharded, facts: SplitFacts) -> ShardedModel:
    """Return the shards of a model that another process has cut into units. The shards have no values yet."""
    pipeline = Pipeline(len(facts.starts), GPipe(), sharded.ways)
    return _sharded(stage_torch(job, seed, pipeline, facts, TorchUnit), sharded, f"job {job.name!r}")


def _sharded(units: PipelineModel, sharded: Sharded, who: str) -> ShardedModel:
    """Divide the parameters of each unit among the ways."""
    held = [
        [(number, sharded.collective.share(sharded.ways, size, way)) for number, size in enumerate(units.sizes)]
        for way in range(sharded.ways)
    ]
    engine, parts = shards_of(units, held, sharded, who)
    words = tuple(f"shard {way} of {', '.join(units.layers)}" for way in range(sharded.ways))
    return ShardedModel(engine, parts, words, units.facts, sharded, units)


def shards_of(
    split: SplitModel, held: Sequence[Sequence[tuple[int, slice]]], partition: Partition, who: str
) -> tuple[PartsEngine, tuple[ModelShard, ...]]:
    """Return the engine and the parts of a model whose workers hold shards of the parts of `split`: `held` has, for
    each worker of a replica, the parts of which it holds a shard, and the elements of the shard. The result is
    called `who` in errors, and has the given `partition`.
    """
    engine, dtype = split.engine, split.engine.schema.dtype
    assert isinstance(engine, PartsEngine)
    entries = [[entry for number, span in one for entry in _within(split.parts[number], span)] for one in held]
    for worker, own in enumerate(entries):
        if not own:
            raise ConfigurationError(
                f"every worker of {partition} must hold parameters, got none for {partition.part_name(worker)} in "
                f"{who}, whose parts have {', '.join(map(str, split.sizes))} parameters; use fewer ways, or "
                "collective=ring"
            )
    starts = [sum(split.sizes[:number]) for number in range(len(split.parts))]
    spans = [slice(starts[number] + span.start, starts[number] + span.stop) for one in held for number, span in one]
    schema = Schema(dtype, tuple(_one_after_another([entry for own in entries for entry in own])))
    parts = tuple(
        ModelShard(
            Schema(dtype, tuple(_one_after_another(own))),
            engine.train_size,
            [split.parts[number] for number, _ in one],
            [span for _, span in one],
        )
        for one, own in zip(held, entries, strict=True)
    )

    def order() -> npt.NDArray[np.int64]:
        order = np.concatenate([np.arange(span.start, span.stop) for span in spans])
        return order if engine.order is None else engine.order[order]

    return PartsEngine(engine.whole, schema, (), order), parts


def _within(part: HeldPart, span: slice) -> Iterator[Entry]:
    """The tensors in a shard of a part; of a tensor that is cut, a piece with one axis."""
    for entry in part.schema.entries:
        first, last = max(entry.offset, span.start), min(entry.offset + entry.size, span.stop)
        if last - first == entry.size:
            yield entry
        elif first < last:
            name = f"{entry.name}[{first - entry.offset}:{last - entry.offset}]"
            yield Entry(name, (last - first,), 0, entry.dtype)


def _one_after_another(entries: Sequence[Entry]) -> Iterator[Entry]:
    """The tensors with the offsets that they have one after another."""
    offset = 0
    for entry in entries:
        yield replace(entry, offset=offset)
        offset += entry.size


def shard_parts(job: Job, inner: SplitModel, partition: ShardedParts) -> ShardedPartsModel:
    """Divide the parameters of each part of a split model among the workers that hold the part.

    Dropout on shard w of replica r draws from the streams of replica r W + w of the inner partition, for W shards.

    Raises:
        ConfigurationError: a layer's outputs depend on all samples of a batch, a buffer changes in training, a batch
            has fewer samples than there are shards and micro-batches, a worker would hold no parameter, or the loss is
            not the mean over samples.
    """
    sharded, who = partition.sharded, f"job {job.name!r}"
    whole = engine_of(inner).whole
    if isinstance(whole, TorchEngine):
        check_samples("sharded", sharded.ways, job.batch // inner.microbatches)
        check_loss(engine_of(inner), whole, sharded.ways, who, "partition=none")
        known = (of_all_samples(layer, list(whole.changing_buffers)) for layer in model_chain(whole.module, who))
        why = next((one for one in known if one), None) or difference_in_shares(inner, sharded.ways)
        if why:
            raise ConfigurationError(
                f"the shards of {partition} compute different samples, so that every layer must compute each sample on "
                f"its own, got {why} of {who}; use for example nn.GroupNorm, or partition={partition.inner}"
            )
    held = [
        [(part, sharded.collective.share(sharded.ways, size, shard))]
        for part, size in enumerate(inner.sizes)
        for shard in range(sharded.ways)
    ]
    engine, parts = shards_of(inner, held, partition, who)
    words = tuple(f"shard {shard} of {layers}" for layers in inner.layers for shard in range(sharded.ways))
    return ShardedPartsModel(engine, parts, words, inner.facts, partition, inner)
