"""A split torch module whose parts are each stored in shards on several workers."""

from __future__ import annotations

from flockstep.errors import ConfigurationError
from flockstep.frameworks.base import Job
from flockstep.frameworks.shards import ShardedPartsModel
from flockstep.frameworks.stages import SplitModel
from flockstep.frameworks.torch import TorchEngine
from flockstep.frameworks.torch_blocks import of_all_samples
from flockstep.frameworks.torch_shards import shards_of
from flockstep.frameworks.torch_stages import check_loss, difference_in_shares, engine_of, model_chain
from flockstep.partitions.base import check_samples
from flockstep.partitions.sharded import ShardedParts


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
        _require_own_samples(inner, whole, partition, who)
    held = [
        [(part, sharded.collective.share(sharded.ways, size, shard))]
        for part, size in enumerate(inner.sizes)
        for shard in range(sharded.ways)
    ]
    engine, parts = shards_of(inner, held, partition, who)
    words = tuple(f"shard {shard} of {layers}" for layers in inner.layers for shard in range(sharded.ways))
    return ShardedPartsModel(engine, parts, words, inner.facts, partition, inner)


def _require_own_samples(inner: SplitModel, whole: TorchEngine, partition: ShardedParts, who: str) -> None:
    """Check that every layer computes each sample on its own.

    Raises:
        ConfigurationError: a layer computes or stores statistics of its samples.
    """
    known = (of_all_samples(layer, list(whole.changing_buffers)) for layer in model_chain(whole.module, who))
    why = next((one for one in known if one), None) or difference_in_shares(inner, partition.sharded.ways)
    if why:
        raise ConfigurationError(
            f"the shards of {partition} compute different samples, so that every layer must compute each sample on its "
            f"own, got {why} of {who}; use for example nn.GroupNorm, or partition={partition.inner}"
        )
