"""Splits a job's model into the parts of a partition."""

from __future__ import annotations

import sys
import weakref

from flockstep.arrays.memory import release
from flockstep.errors import CompositionError, ConfigurationError
from flockstep.frameworks.base import Job
from flockstep.frameworks.job import build_model
from flockstep.partitions.base import JointPartition, Partition
from flockstep.partitions.grid import SpatialGrid
from flockstep.partitions.pipeline import Pipeline
from flockstep.partitions.split_facts import SplitFacts
from flockstep.split.joint import JointModel
from flockstep.split.stages import SplitModel


def make_split(job: Job, seed: int, partition: Partition, facts: SplitFacts | None = None) -> SplitModel:
    """Return the job's model, split into the parts of `partition`. With `facts`, which another process has found, this
    process holds only one part of the model. Raise `ConfigurationError` if the model is not a torch module, or
    cannot be split into these parts; `CompositionError` if no framework can split models in this way.
    """
    if facts is None:
        _require_torch(job)
    match partition:
        case Pipeline():
            from flockstep.split.torch_stages import split_torch

            return split_torch(job, seed, partition, facts)
        case JointPartition():
            from flockstep.split.torch_joint import join_torch

            return join_torch(job, seed, partition, facts)
        case SpatialGrid():
            from flockstep.split.torch_grid import split_grid

            return split_grid(job, seed, partition, facts)
    raise CompositionError(
        f"torch models cannot be split by {partition}; use pipeline, tensor, sharded, grid or partition=none"
    )


def _require_torch(job: Job) -> None:
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


def without_whole(job: Job, seed: int, split: SplitModel) -> SplitModel:
    """Return the split model in a form that lets this process hold a single part without building the whole model; if
    that is impossible, the facts of the returned model hold the reason.
    """
    if isinstance(split, JointModel):
        from flockstep.split.torch_joint import TorchJointModel, with_trial

        assert isinstance(split, TorchJointModel)
        return with_trial(split, job, seed)
    from flockstep.split.torch_stages import with_obstacle

    return with_obstacle(split, lambda: make_split(job, seed, split.partition, split.facts))
