"""The surrogates of all kinds of split models."""

from __future__ import annotations

from flockstep.errors import ConfigurationError
from flockstep.partitions.base import Partition
from flockstep.partitions.pipeline import Pipeline
from flockstep.partitions.sharded import Sharded, ShardedParts
from flockstep.partitions.tensor import Product, TensorParallel
from flockstep.planning.job_profile import JobProfile
from flockstep.planning.pipeline_surrogate import pipeline_shape
from flockstep.planning.shards_surrogate import sharded_parts_shape, shards_shape
from flockstep.planning.split_shape import SplitShape
from flockstep.planning.ways_surrogate import ways_shape


def split_shape(task: JobProfile, partition: Partition) -> SplitShape:
    """Return the model of a task as `partition` splits it.

    Raises:
        ConfigurationError: the layers of the model are unknown, the model cannot be split in this way, or plans do not
            predict the partition.
    """
    match partition:
        case Pipeline():
            return pipeline_shape(task, partition)
        case TensorParallel() | Product():
            return ways_shape(task, partition)
        case Sharded():
            return shards_shape(task, partition)
        case ShardedParts():
            return sharded_parts_shape(task, partition, split_shape(task, partition.inner))
    raise ConfigurationError(
        f"a plan of split models predicts pipeline, tensor, pipeline * tensor, sharded and each of them * sharded, got "
        f"{partition}; use one of them, leave it out for whole replicas, or run flockstep simulate with this partition"
    )
