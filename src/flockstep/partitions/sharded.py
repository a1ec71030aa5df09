"""Sharded parameters: every worker stores a part of each layer, and computes all layers on a part of the batch; the
parts of another partition may be sharded too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flockstep.collectives.base import Collective
from flockstep.collectives.ring import Ring
from flockstep.errors import CompositionError
from flockstep.partitions.base import Addressing, CombinedPartition, Division, Partition, check_ways


@dataclass(frozen=True)
class Sharded(Partition):
    """Parameters, gradients and optimizer state divided among `ways` workers (Rajbhandari et al. 2020, ZeRO stage 3).

    Each worker of a replica stores 1/p of the parameters of each layer, and computes the model on 1/p of the replica's
    batch. The parameters of a layer are gathered before its forward pass and again before its backward pass, and
    dropped afterwards; the gradient of a layer is reduced and scattered. So a worker sends 3 (p - 1)/p K elements per
    step for K parameters, where data parallelism sends 2 (p - 1)/p K.
    """

    divides: ClassVar[Division] = "state"
    part_noun: ClassVar[str] = "shard"
    addressing: ClassVar[Addressing] = "distributed array abstraction"

    ways: int
    collective: Collective = Ring()
    """Collective that all-gathers parameters and reduce-scatters gradients across the workers of a replica."""

    def __post_init__(self) -> None:
        check_ways("sharded", self.ways, self.collective)

    @property
    def parts(self) -> int:
        return self.ways

    def batches_held(self, part: int) -> float:
        """Return the fraction of a batch that each worker computes, 1/p for p ways."""
        return 1 / self.ways

    def copies(self, part: int) -> int:
        """Return 1, because a way stores one version of its parameters, that of the current step."""
        return 1

    def __mul__(self, other: object) -> ShardedParts:
        return ShardedParts(other, self) if isinstance(other, Partition) else NotImplemented

    __rmul__ = __mul__


@dataclass(frozen=True)
class ShardedParts(CombinedPartition):
    """Another partition whose parts are each held by the W workers of `sharded`: `pipeline(2) * sharded(2)`.

    Each of the W workers stores 1/W of the part's parameters, gradient and optimizer state, and computes the part on
    its 1/W of the replica's batch. At the beginning of a step the W workers gather the parameters of the part, then
    compute as a replica of the inner partition does, together with the workers that have the same shard of the other
    parts, and at the end reduce and scatter the gradient of the part. For K parameters of the part, a worker sends
    2 (W - 1)/W K elements per step for these collectives, besides the messages of the inner partition.

    Unlike the layers of `sharded` alone, a part is gathered as a whole, once per step: a pipeline passes its layers
    once per micro-batch, so that gathering layer by layer would multiply the bytes by the number of micro-batches. For
    this reason DeepSpeed, the implementation of ZeRO (Rajbhandari et al. 2020), combines pipelines with stage 1 only.
    So memory is saved for what a worker stores (parameters, gradient, optimizer state, buffers of the strategy), but
    not for the gathered parameters of the part and their gradient, with which the worker computes.
    """

    divides: ClassVar[Division] = "state"

    inner: Partition
    sharded: Sharded

    def __post_init__(self) -> None:
        if self.inner.divides not in ("layers", "tensors"):
            raise CompositionError(
                f"the parts of pipeline, tensor, pipeline * tensor and grid can be combined with {self.sharded}, got "
                f"{self.inner}; use one of them, or {self.sharded} alone"
            )

    @property
    def factors(self) -> tuple[Partition, Partition]:
        return self.inner, self.sharded

    @property
    def splits_model(self) -> bool:
        return True

    def batches_held(self, part: int) -> float:
        """Return the number of batches whose activations a worker stores at the same time: 1/W of those of its part."""
        return super().batches_held(part) / self.sharded.ways

    def copies(self, part: int) -> int:
        """Return the number of copies of its shard that a worker stores: W for each copy of the whole part."""
        return self.sharded.ways * super().copies(part)
