"""Tensor parallelism: every worker computes a part of the same layers, which may also be cut into stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flockstep.collectives.base import Collective
from flockstep.collectives.ring import Ring
from flockstep.partitions.base import Addressing, CombinedPartition, Division, Partition, check_ways
from flockstep.partitions.pipeline import Pipeline


@dataclass(frozen=True)
class TensorParallel(Partition):
    """Tensor parallelism: layers split over `ways` workers, which compute the same batch (Shoeybi et al. 2019,
    Megatron-LM; Krizhevsky 2014).

    Of two fully connected layers, the first is split by its outputs and the second by its inputs; attention is split by
    heads; an embedding, and the layer before a cross entropy, by the vocabulary. Each such pair needs one sum over the
    ways in the forward pass and one in the backward pass. Every way computes all other layers, except
    layers that `convolutions` divides by samples.
    """

    divides: ClassVar[Division] = "tensors"
    part_noun: ClassVar[str] = "way"
    addressing: ClassVar[Addressing] = "distributed array abstraction"

    ways: int
    collective: Collective = Ring()
    """Collective that sums outputs, and the gradients of inputs, over the ways."""
    convolutions: Literal["replicated", "divided"] = "replicated"
    """How the ways compute the layers before the first split layer, such as convolutions: "replicated" if every way
    computes all samples of the batch; "divided" if each way computes its share of the samples, so that these layers are
    data parallel (Krizhevsky 2014, scheme (a)). The ways then gather the activations of all samples for the first split
    layer, return their gradients to the ways that own the samples, and sum the gradients of these layers' parameters.
    """

    def __post_init__(self) -> None:
        check_ways("tensor", self.ways, self.collective)

    @property
    def parts(self) -> int:
        return self.ways

    def copies(self, part: int) -> int:
        """Return 1, because a way stores a copy of its parameters while it computes a step."""
        return 1

    def __mul__(self, other: object) -> Product:
        return Product(other, self) if isinstance(other, Pipeline) else NotImplemented

    __rmul__ = __mul__


@dataclass(frozen=True)
class Product(CombinedPartition):
    """A model cut into stages, whose layers are split over ways: `pipeline(2) * tensor(2)` (Narayanan et al. 2021)."""

    divides: ClassVar[Division] = "tensors"

    pipeline: Pipeline
    tensor: TensorParallel

    @property
    def factors(self) -> tuple[Partition, Partition]:
        return self.pipeline, self.tensor

    @property
    def notes(self) -> list[str]:
        if self.pipeline.stages == 1:
            return self.pipeline.notes
        said = (
            "The first workers of a replica are the ways of stage 0, the next those of stage 1; tensor * pipeline is "
            "the same partition as pipeline * tensor."
        )
        return [*self.pipeline.notes, said]
