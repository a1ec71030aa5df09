"""Sharded parameters: every worker stores a part of each layer, and computes all layers on a part of the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flockstep.collectives.base import Collective
from flockstep.collectives.ring import Ring
from flockstep.errors import CompositionError
from flockstep.partitions.base import Addressing, Division, Partition, check_ways


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

    def __mul__(self, other: object) -> Partition:
        raise CompositionError(
            f"{self} cannot be combined with {other} yet; use {self} alone, or pipeline * tensor; a strategy trains "
            "several replicas of either"
        )

    __rmul__ = __mul__
