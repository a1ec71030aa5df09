"""The interface between drivers and frameworks for a model in parts, such as the stages of a pipeline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flockstep.arrays.schema import FlatArray
from flockstep.frameworks.base import Engine, Indices, TrainedModel
from flockstep.partitions.base import Partition
from flockstep.partitions.pipeline import Pipeline
from flockstep.partitions.split_facts import SplitFacts


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of one replica's batch."""

    replica: int
    step: int
    number: int
    """Number of the micro-batch in the step."""
    indices: Indices
    """Training samples of the micro-batch."""
    share: float
    """Share of the micro-batch in the samples of the batch."""


@dataclass(frozen=True)
class PassShares:
    """Work of each kind of pass of one chunk, as shares of the work of a gradient of the whole model."""

    forward: float
    input_backward: float
    weight_backward: float

    @property
    def backward(self) -> float:
        """Share of the whole backward pass, for the inputs and for the weights."""
        return self.input_backward + self.weight_backward


@dataclass(frozen=True)
class Tie:
    """A parameter that the part `owner` trains, and that the part `user` computes with too.

    The user adds the gradient of its use to the owner's gradient once per step, as Megatron-LM sums the gradients of
    the copies of an embedding.
    """

    owner: int
    lent: slice
    """The elements of the parameter in the flat array (K,) of the owner."""
    user: int
    borrowed: slice
    """The elements of the parameter in the array with which the user computes."""


class HeldPart(TrainedModel):
    """One part of a job's model, the same for any replica."""

    held_bytes: int
    """Number of bytes that `values` returns."""

    @abstractmethod
    def values(self) -> npt.NDArray[np.uint8]:
        """Return the bytes of the initial parameters (K,) of this part, followed by those of its other tensors."""

    @abstractmethod
    def take(self, values: npt.NDArray[np.uint8]) -> FlatArray:
        """Store the tensors of this part, which another process obtained from `values`, and return a copy of the
        initial parameters (K,).
        """

    @abstractmethod
    def buffers(self, replica: int) -> FlatArray:
        """Return a replica's changing buffers that belong to this part, concatenated in float64; empty if there are
        none. The engine's `buffers` are those of all parts, concatenated.
        """

    @abstractmethod
    def restore_buffers(self, replica: int, values: FlatArray) -> None:
        """Set a replica's buffers of this part to an array that `buffers` returned, possibly in another process."""

    @property
    @abstractmethod
    def kept(self) -> int:
        """Number of forward passes, over all replicas, whose activations are currently stored."""


class ModelPart(HeldPart):
    """One stage of a job's model: the passes of any replica over the stage's chunks of consecutive layers.

    A forward pass stores what the backward passes over the same micro-batch need, until the last of these passes.
    Passes compute with arrays (K + B,): the K parameters of the part, followed by the B elements that it borrows.
    """

    shares: Sequence[PassShares]
    """Work of the passes of each chunk."""
    borrowed: int = 0
    """Number of elements that other parts train and this part computes with too (B)."""

    @abstractmethod
    def forward(
        self, chunk: int, params: FlatArray, batch: MicroBatch, inputs: FlatArray | None
    ) -> tuple[FlatArray | None, float]:
        """Compute the outputs of a chunk; the last chunk returns its share in the batch's mean loss instead.

        Args:
            chunk: number of the chunk in this part.
            params: the parameters (K + B,) of the part, which do not change before the last backward pass.
            batch: the micro-batch.
            inputs: outputs of the previous chunk, samples on the first axis; None for the first chunk of the model.

        Returns:
            Outputs and loss: None and the loss for the last chunk of the model, otherwise the outputs and 0.
        """

    @abstractmethod
    def backward(self, chunk: int, batch: MicroBatch, errors: FlatArray | None, out: FlatArray) -> FlatArray | None:
        """Add the gradient of a chunk's parameters to `out` (K + B,), and return the gradient of its inputs.

        `errors` is the gradient of the outputs, None for the last chunk; the result is None for the first chunk.
        """

    @abstractmethod
    def input_backward(self, chunk: int, batch: MicroBatch, errors: FlatArray | None) -> FlatArray | None:
        """Return the gradient of a chunk's inputs, as `backward` does; a call of `weight_backward` must follow."""

    @abstractmethod
    def weight_backward(self, chunk: int, batch: MicroBatch, out: FlatArray) -> None:
        """Add the gradient of a chunk's parameters, after `input_backward`, to `out` (K + B,)."""

    def release(self, chunk: int, batch: MicroBatch) -> None:
        """Free the parameters that a forward pass has kept, if the part is able to; `restore` must follow before the
        backward pass.
        """

    def restore(self, chunk: int, batch: MicroBatch, params: FlatArray) -> None:
        """Take back the parameters (K + B,) that `release` has freed; they must be those of the forward pass."""


@dataclass(frozen=True, eq=False)
class SplitModel(ABC):
    """A job whose model is split into parts.

    `engine` evaluates whole models, whose flat array (K,) concatenates the arrays of the parts.
    """

    engine: Engine
    parts: Sequence[HeldPart]
    layers: tuple[str, ...]
    """Names of the layers of each part, as text."""
    facts: SplitFacts

    @property
    @abstractmethod
    def partition(self) -> Partition:
        """The partition that divides the model."""

    @property
    @abstractmethod
    def microbatches(self) -> int:
        """Number of micro-batches into which a batch is divided."""

    def largest_message(self, batch: int) -> int:
        """Return the size in bytes of the largest array that parts send each other, for batches of `batch` samples."""
        return -(-batch // self.microbatches) * self.facts.sample_bytes

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of the parameters of each part."""
        return tuple(part.schema.size for part in self.parts)


@dataclass(frozen=True, eq=False)
class PipelineModel(SplitModel):
    """A job whose model is cut into the stages of a pipeline."""

    parts: tuple[ModelPart, ...]
    pipeline: Pipeline
    ties: tuple[Tie, ...] = ()
    """The parameters that more than one part computes with."""

    @property
    def partition(self) -> Partition:
        return self.pipeline

    @property
    def microbatches(self) -> int:
        return self.pipeline.microbatches

    def lent(self, own: Sequence[FlatArray]) -> list[FlatArray]:
        """Return the arrays (K + B,) with which the parts compute, from the parameters (K,) of each."""
        found = [
            np.concatenate([one, np.zeros(part.borrowed, one.dtype)]) for one, part in zip(own, self.parts, strict=True)
        ]
        for tie in self.ties:
            found[tie.user][tie.borrowed] = own[tie.owner][tie.lent]
        return found

    def returned(self, slopes: Sequence[FlatArray]) -> list[FlatArray]:
        """Return the gradient (K,) of each part, from the gradients (K + B,) of the arrays of `lent`."""
        own = [slope[: part.schema.size].copy() for slope, part in zip(slopes, self.parts, strict=True)]
        for tie in self.ties:
            own[tie.owner][tie.lent] += slopes[tie.user][tie.borrowed]
        return own

    def largest_message(self, batch: int) -> int:
        itemsize = np.dtype(self.engine.schema.dtype).itemsize
        lent = max((tie.lent.stop - tie.lent.start for tie in self.ties), default=0)
        return max(super().largest_message(batch), itemsize * lent)
