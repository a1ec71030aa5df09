"""The interface between drivers and frameworks for a model whose layers are split over several ways.

A way is one of the workers that share the layers of a stage (a tensor-parallel rank in Megatron-LM).
Such a model may also be cut into stages of consecutive layers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from flockstep.arrays.schema import FlatArray
from flockstep.frameworks.stages import HeldPart, MicroBatch, SplitModel
from flockstep.partitions.base import Partition
from flockstep.partitions.pipeline import Pipeline
from flockstep.partitions.tensor import TensorParallel


@dataclass(frozen=True)
class BlockShares:
    """Work that one way does for a block, as shares of the work of a whole gradient of the whole model."""

    forward: float
    backward: float


@dataclass(frozen=True, eq=False)
class WayWeights:
    """The parameters with which one way computes a step."""

    own: FlatArray
    """The way's own parameters (K,)."""
    copied: Sequence[FlatArray]
    """The parameters of layers that every way computes, as each way holds some of them."""


class ModelWay(HeldPart):
    """One way of a stage of a job's model, for any replica: its passes between the sums over all ways.

    A chunk is a sequence of blocks. A block is some layers that every way computes alike, and then split layers, whose
    outputs are terms of a sum over the ways. The last block of a chunk has no split layers; that of the last chunk ends
    with the loss.
    """

    shares: Sequence[Sequence[BlockShares]]
    """Work of each block of each chunk."""
    copies: bool
    """Whether any way holds parameters that all ways compute with."""

    @abstractmethod
    def copied(self, params: FlatArray) -> FlatArray:
        """Return the part of the parameters (K,) that all ways compute with and that this way holds."""

    @abstractmethod
    def forward(
        self, chunk: int, block: int, weights: WayWeights, batch: MicroBatch, given: FlatArray | None
    ) -> tuple[FlatArray | None, float]:
        """Compute the term of a block that this way adds to the sum; the last block returns the outputs of the chunk.

        Args:
            chunk: number of the chunk in this part.
            block: number of the block in the chunk.
            weights: the parameters, which do not change before the backward pass.
            batch: the micro-batch.
            given: sum over the ways of the terms of the block before; for the first block the outputs of the chunk
                before, None if there is none.

        Returns:
            Term and 0, or for the last block outputs and 0; for the last block of the model None and its share in the
            mean loss of the batch.
        """

    @abstractmethod
    def backward(
        self, chunk: int, block: int, batch: MicroBatch, errors: FlatArray | None, out: FlatArray
    ) -> FlatArray | None:
        """Compute backward from a block's split layers, or from the loss, to the inputs of the split layers before it.

        Gradients of this way's parameters are added to `out` (K,).

        Args:
            chunk: number of the chunk in this part.
            block: number of the block in the chunk.
            batch: the micro-batch.
            errors: sum over the ways of the terms that the block behind has returned, None if it returned None; for
                the last block the gradient of the chunk's outputs, None for the last chunk.
            out: gradient of this way's parameters.

        Returns:
            The term that this way adds to the gradient of the inputs of the split layers before the block; for the
            first block the gradient of the chunk's inputs; None if nothing before depends on it.
        """


@dataclass(frozen=True, eq=False)
class TensorModel(SplitModel):
    """A job whose model is cut into stages, one or several, and whose layers are split over ways.

    Way w of stage s is part s W + w, for W ways.
    """

    parts: tuple[ModelWay, ...]
    split_by: Partition
    pipeline: Pipeline
    tensor: TensorParallel
    copied_bytes: int
    """Size in bytes of the largest part of the parameters that one way sends to the others."""

    @property
    def partition(self) -> Partition:
        return self.split_by

    @property
    def microbatches(self) -> int:
        return self.pipeline.microbatches

    def largest_message(self, batch: int) -> int:
        return max(super().largest_message(batch), self.copied_bytes)
