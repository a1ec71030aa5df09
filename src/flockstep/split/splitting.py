"""Splits a job's model into the parts of a partition."""

from __future__ import annotations

import importlib
import sys
import weakref
from dataclasses import replace
from typing import Any

from flockstep.arrays.memory import release
from flockstep.errors import CompositionError, ConfigurationError
from flockstep.frameworks.base import Job
from flockstep.frameworks.job import build_model
from flockstep.partitions.base import Partition
from flockstep.partitions.grid import SpatialGrid
from flockstep.partitions.pipeline import Pipeline
from flockstep.partitions.sharded import Sharded, ShardedParts
from flockstep.partitions.split_facts import SplitFacts
from flockstep.partitions.tensor import Product, TensorParallel
from flockstep.split.shards import ShardedPartsModel
from flockstep.split.stages import SplitModel

_SPLITTERS: dict[type[Partition], tuple[str, str, str]] = {
    Pipeline: ("torch_stages", "split_torch", "stage_torch"),
    TensorParallel: ("torch_ways", "split_layers", "ways_without_values"),
    Product: ("torch_ways", "split_layers", "ways_without_values"),
    Sharded: ("torch_shards", "shard_torch", "shards_without_values"),
    SpatialGrid: ("torch_grid", "split_grid", "rectangles_without_values"),
}
"""Kind of partition → module, and its functions that split a job's model whole and in one part's process."""


def make_split(job: Job, seed: int, partition: Partition, facts: SplitFacts | None = None) -> SplitModel:
    """Return the job's model, split into the parts of `partition`. With `facts`, which another process has found, this
    process holds only one part of the model. Raise `ConfigurationError` if the model is not a torch module, or
    cannot be split into these parts; `CompositionError` if no framework can split models in this way.
    """
    if isinstance(partition, ShardedParts):
        inner = make_split(job, seed, partition.inner, facts)
        from flockstep.split.torch_shards import shard_parts

        return shard_parts(job, inner, partition)
    if facts is not None:
        part: SplitModel = _splitter_of(partition)[1](job, seed, partition, facts)
        return part
    model = build_model(job)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        raise ConfigurationError(
            f"a model that is split must be a torch.nn.Module, got {type(model).__name__} of job {job.name!r}; use "
            "partition=none"
        )
    kept = weakref.ref(model)
    del model  # freed before the split builds a model with its own seed
    release(collect=kept() is not None)
    split: SplitModel = _splitter_of(partition)[0](job, seed, partition)
    return split


def without_whole(job: Job, seed: int, split: SplitModel) -> SplitModel:
    """Return the split model in a form that lets this process hold a single part without building the whole model; if
    that is impossible, the facts of the returned model hold the reason.
    """
    if isinstance(split, ShardedPartsModel):
        inner = without_whole(job, seed, split.inner)
        return replace(split, inner=inner, facts=inner.facts)
    from flockstep.split.torch_stages import with_obstacle

    build = _splitter_of(split.partition)[1]
    return with_obstacle(split, lambda: build(job, seed, split.partition, split.facts))


def _splitter_of(partition: Partition) -> list[Any]:
    """The two functions for a partition, from a module that imports torch."""
    for kind, (module, *names) in _SPLITTERS.items():
        if isinstance(partition, kind):
            found = importlib.import_module(f"flockstep.split.{module}")
            return [getattr(found, name) for name in names]
    raise CompositionError(
        f"torch models cannot be split by {partition}; use pipeline, tensor, sharded, grid or partition=none"
    )
