"""The interface between drivers and frameworks for a model whose layers are split over several ways (tensor
parallelism).

A way is one of the workers that share the layers of a stage (a tensor-parallel rank in Megatron-LM).
Such a model may also be cut into stages of consecutive layers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from flockstep.arrays.schema import FlatArray
from flockstep.partitions.pipeline import Pipeline
from flockstep.partitions.tensor import TensorParallel
from flockstep.split.stages import HeldPart, MicroBatch, PassShares, SplitModel


@dataclass(frozen=True)
class BlockShares(PassShares):
    """The work of the passes over one block on one way (one worker of a stage), as shares of the work of a gradient of
    the whole model. `forward` is without divided layers.
    """

    divided: float = 0.0
    """Share of the forward pass over the way's own samples, of layers that are divided by samples."""
    holds: float = 0.0
    """Number of elements per sample of the outputs of the block's layers on this way, for the backward pass."""


@dataclass(frozen=True)
class BlockOutputs:
    """Numbers of elements, for one sample, of the arrays that the ways add or pass on; 0 if there is no array."""

    forward: float
    """Number of elements of the block's outputs, for one sample."""
    backward: float
    """Number of elements of the gradient of the block's inputs, for one sample."""
    divided: float = 0.0
    """Number of elements of the outputs of divided layers, for one sample, which the ways gather."""


@dataclass(frozen=True, eq=False)
class WayWeights:
    """The parameters with which one way (one worker of a stage) computes the passes of a step."""

    own: FlatArray
    """The parameters (K,) that the way itself trains."""
    copied: Sequence[FlatArray]
    """Parameters of layers that every way computes, an array from each way, which trains some of them."""


class ModelWay(HeldPart):
    """The interface of one way of a stage of a job's model, which computes the passes of any replica between the sums
    over all ways.

    A chunk is a sequence of blocks. A block consists of layers that every way computes identically, followed by split
    layers, whose outputs are terms of a sum over the ways. The last block of a chunk has no split layers; the last
    block of the last chunk ends with the loss. In the first block of the model, the layers before the split layers may
    be divided by samples instead: each way computes its own samples (Krizhevsky 2014).

    Backward passes add to an array (K + B,): the gradient of the K parameters of the way, followed by the gradient of
    B parameters of divided layers that other ways train.
    """

    shares: Sequence[Sequence[BlockShares]]
    """Work of the passes over each block of each chunk."""
    copies: bool
    """Whether any way holds parameters of layers that all ways compute."""
    divided_parameters: Sequence[slice] = ()
    """Elements, in the gradient (K + B,), of divided layers that each way trains; empty without such layers."""
    borrowed: int = 0
    """Number B of parameters of divided layers that other ways train."""

    def divides(self, chunk: int, block: int) -> bool:
        """Return whether the layers before the split layers of a block are divided by samples."""
        return bool(self.divided_parameters) and not chunk and not block

    @abstractmethod
    def divided(self, weights: WayWeights, batch: MicroBatch) -> FlatArray:
        """Compute and return the outputs of the divided layers for this way's samples, with samples on the first axis.

        A call of `forward` for block 0 of chunk 0 must follow.
        """

    @abstractmethod
    def copied(self, params: FlatArray) -> FlatArray:
        """Return the part of this way's parameters (K,) that belongs to layers which all ways compute."""

    @abstractmethod
    def forward(
        self, chunk: int, block: int, weights: WayWeights, batch: MicroBatch, given: FlatArray | None
    ) -> tuple[FlatArray | None, float]:
        """Compute and return the term of a block that this way adds to the sum over the ways, and 0. The last block of
        a chunk instead returns the outputs of the chunk; the last block of the model returns None and the
        micro-batch's share in the mean loss of the batch. `weights` must not change before the backward pass.

        `given` is the sum over the ways of the terms of the previous block; for the first block, the outputs of the
        previous chunk, or, for the first chunk, the outputs of the divided layers for all samples (None without them).
        """

    @abstractmethod
    def backward(
        self, chunk: int, block: int, batch: MicroBatch, errors: FlatArray | None, out: FlatArray | None
    ) -> FlatArray | None:
        """Compute backward from a block's split layers, or from the loss, to the inputs of the split layers before it,
        and add the gradients of parameters to `out` (K + B,). Without `out`, there are no gradients of parameters, and
        `weight_backward` must follow.

        `errors` is the sum over the ways of what the next block's backward pass has returned; for divided layers, of
        this way's samples, as `batch`; for the last block, the gradient of the chunk's outputs, or None for the last
        chunk. The result is this way's term of the gradient of the inputs of the split layers before the block; for the
        first block, the gradient of the chunk's inputs; None if no earlier layer needs the gradient.
        """

    @abstractmethod
    def weight_backward(self, chunk: int, batch: MicroBatch, out: FlatArray) -> None:
        """Add the gradients of this way's parameters in all blocks of a chunk to `out` (K + B,), after `backward`
        without `out` of each block. Only the gradients of divided layers need a sum over the ways.
        """


@dataclass(frozen=True, eq=False)
class TensorModel(SplitModel):
    """A job whose model is cut into one or several stages, and whose layers are split over ways (tensor parallelism).

    Way w of stage s is part s W + w, for W ways.
    """

    parts: tuple[ModelWay, ...]
    pipeline: Pipeline
    tensor: TensorParallel
    copied_bytes: int
    """Size in bytes of the largest array of parameters that one way sends to the other ways."""
    outputs: Sequence[Sequence[BlockOutputs]] = ()
    """Outputs of each block of each chunk of the model; empty in a process that has not computed the whole model."""

    @property
    def microbatches(self) -> int:
        return self.pipeline.microbatches

    def largest_message(self, batch: int) -> int:
        return max(super().largest_message(batch), self.copied_bytes)
