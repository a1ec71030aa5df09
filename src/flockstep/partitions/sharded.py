"""Sharded parameters: every worker stores a part of each layer, and computes all layers on a part of the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flockstep.partitions.base import Division, JointPartition


@dataclass(frozen=True)
class Sharded(JointPartition):
    """Parameters, gradients and optimizer state divided among `ways` workers by FSDP2 (Rajbhandari et al. 2020, ZeRO
    stage 3).

    Each worker of a replica stores 1/p of the parameters of each layer, and computes the model on 1/p of the replica's
    batch. The parameters of a layer are gathered before its forward pass and again before its backward pass, and
    dropped afterwards; the gradient of a layer is reduced and scattered. So a worker sends 3 (p - 1)/p K elements per
    step for K parameters, where data parallelism sends 2 (p - 1)/p K.
    """

    divides: ClassVar[Division] = "state"
    part_noun: ClassVar[str] = "shard"

    @property
    def shares(self) -> int:
        return self.ways

    def batches_held(self, part: int) -> float:
        """Return the fraction of a batch that each worker computes, 1/p for p ways."""
        return 1 / self.ways
