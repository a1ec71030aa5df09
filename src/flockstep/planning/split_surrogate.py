"""The surrogates of all kinds of split models."""

from __future__ import annotations

from flockstep.errors import ConfigurationError
from flockstep.partitions.base import Partition
from flockstep.partitions.pipeline import Pipeline
from flockstep.partitions.sharded import Sharded
from flockstep.partitions.tensor import Product, TensorParallel
from flockstep.planning.job_profile import JobProfile
from flockstep.planning.pipeline_surrogate import pipeline_shape
from flockstep.planning.shards_surrogate import shards_shape
from flockstep.planning.split_shape import SplitShape
from flockstep.planning.ways_surrogate import ways_shape


def split_shape(task: JobProfile, partition: Partition) -> SplitShape:
    """Return the model of a task as `partition` splits it.

    Raises:
        ConfigurationError: the layers of the model are unknown, the model cannot be split in this way, or the partition
            does not split models.
    """
    match partition:
        case Pipeline():
            return pipeline_shape(task, partition)
        case TensorParallel() | Product():
            return ways_shape(task, partition)
        case Sharded():
            return shards_shape(task, partition)
    raise ConfigurationError(
        f"a plan of split models predicts partitions that split the model, got {partition}; write for example "
        "'pipeline(2, 1f1b, 4)', 'tensor(2)' or 'sharded(2)', or leave it out for whole replicas"
    )
