"""Tensor parallelism: every worker computes a part of the same layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flockstep.partitions.base import Division, JointPartition


@dataclass(frozen=True)
class TensorParallel(JointPartition):
    """Tensor parallelism: layers split over `ways` workers, which compute the same batch (Shoeybi et al. 2019,
    Megatron-LM; Krizhevsky 2014), by PyTorch's `parallelize_module`.

    Of two fully connected layers, the first is split by its outputs and the second by its inputs; attention is split by
    heads; an embedding, and the layer before a cross entropy, by the vocabulary. Each such pair needs one sum over the
    ways in the forward pass and one in the backward pass. Every way computes all other layers, except
    layers that `convolutions` divides by samples.
    """

    divides: ClassVar[Division] = "tensors"
    part_noun: ClassVar[str] = "way"

    convolutions: Literal["replicated", "divided"] = "replicated"
    """How the ways compute the layers before the first split layer, such as convolutions: "replicated" if every way
    computes all samples of the batch; "divided" if each way computes its share of the samples, so that these layers are
    data parallel (Krizhevsky 2014, scheme (a)). The ways then gather the activations of all samples for the first split
    layer, return their gradients to the ways that own the samples, and sum the gradients of these layers' parameters.
    """

    @property
    def shares(self) -> int:
        return self.ways if self.convolutions == "divided" else 1
