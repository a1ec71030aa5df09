"""The interface between drivers and frameworks for a model that is cut into parts, such as the stages of a pipeline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flockstep.arrays.schema import FlatArray
from flockstep.frameworks.base import Engine, Indices, TrainedModel
from flockstep.partitions.base import Partition
from flockstep.partitions.pipeline import Pipeline, check_microbatches
from flockstep.partitions.split_facts import SplitFacts


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch: some of the samples of one replica's batch."""

    replica: int
    step: int
    number: int
    """Index of the micro-batch in the step."""
    indices: Indices
    """Indices of the training samples of the micro-batch."""
    share: float
    """Number of samples of the micro-batch, as a share of the samples of the batch."""


@dataclass(frozen=True)
class PassShares:
    """The work of each kind of pass over one chunk, as a fraction of the work of the whole model's gradient."""

    forward: float
    input_backward: float
    weight_backward: float

    @property
    def backward(self) -> float:
        """Share of the backward pass: the gradients of the inputs and of the weights together."""
        return self.input_backward + self.weight_backward


@dataclass(frozen=True)
class Tie:
    """A parameter that one part of a model (`owner`) trains, and with which another part (`user`) also computes.

    The user's gradient of the parameter is added to the owner's gradient once per step, as Megatron-LM sums the
    gradients of the copies of an embedding.
    """

    owner: int
    lent: slice
    """The parameter's elements in the flat array (K,) of the owner."""
    user: int
    borrowed: slice
    """The parameter's elements in the array (K + B,) with which the user computes."""


class HeldPart(TrainedModel):
    """The interface of one part of a job's model, which is the same for every replica."""

    held_bytes: int
    """Number of bytes that `values` returns."""

    def values(self) -> npt.NDArray[np.uint8]:
        """Return the bytes of the part's initial parameters (K,), followed by the bytes of any other tensors."""
        return self.initial().view(np.uint8)

    def take(self, values: npt.NDArray[np.uint8]) -> FlatArray:
        """Store this part's tensors, as bytes of another process's `values`; return a copy of the parameters (K,)."""
        params: FlatArray = values[: self.schema.nbytes].copy().view(self.schema.dtype)
        return params

    def buffers(self, replica: int) -> FlatArray:
        """Return a replica's changing buffers that belong to this part, concatenated in float64; empty if there are
        none. The engine's `buffers` are the buffers of all parts, concatenated.
        """
        return np.empty(0)

    def restore_buffers(self, replica: int, values: FlatArray) -> None:
        """Set a replica's buffers of this part to an array that `buffers` returned, possibly in another process."""
        assert not len(values), f"{type(self).__name__} has no buffers"


class ModelPart(HeldPart):
    """The interface of one stage of a job's model, which computes the passes of any replica over the stage's chunks of
    consecutive layers.

    A forward pass stores the tensors that the backward passes over the same micro-batch need, until the last of these
    passes. Passes compute with arrays (K + B,): the K parameters of the part, followed by the B elements that other
    parts train.
    """

    shares: Sequence[PassShares]
    """Work of the passes over each chunk, in order of the chunks."""
    borrowed: int = 0
    """Number B of elements that other parts train and with which this part also computes."""

    @abstractmethod
    def forward(
        self, chunk: int, params: FlatArray, batch: MicroBatch, inputs: FlatArray | None
    ) -> tuple[FlatArray | None, float]:
        """Compute and return the outputs of chunk number `chunk` of this part, and 0. The last chunk of the model
        instead returns None and the micro-batch's share in the mean loss of the batch.

        `params` (K + B,) must have the same values in each backward pass over the micro-batch. `inputs` are the outputs
        of the previous chunk, with samples on the first axis; None for the first chunk of the model.
        """

    @abstractmethod
    def backward(
        self, chunk: int, batch: MicroBatch, errors: FlatArray | None, out: FlatArray | None
    ) -> FlatArray | None:
        """Add the gradient of a chunk's parameters to `out` (K + B,), and return the gradient of its inputs. Without
        `out`, only the gradient of the inputs is computed, and `weight_backward` must follow.

        `errors` is the gradient of the outputs, or None for the last chunk. The result is None for the first chunk.
        """

    @abstractmethod
    def weight_backward(self, chunk: int, batch: MicroBatch, out: FlatArray) -> None:
        """Add the gradient of a chunk's parameters to `out` (K + B,), after a call of `backward` without `out`."""


@dataclass(frozen=True, eq=False)
class SplitModel(ABC):
    """A job whose model is split into parts.

    `engine` evaluates whole models, whose flat array (K,) concatenates the arrays of the parts.
    """

    engine: Engine
    parts: Sequence[HeldPart]
    layers: tuple[str, ...]
    """Names of the layers of each part, as one text for each part."""
    facts: SplitFacts
    partition: Partition
    """The partition by which the model is divided into parts."""

    @property
    @abstractmethod
    def microbatches(self) -> int:
        """Number of micro-batches into which a batch is divided."""

    @property
    def note(self) -> str | None:
        """Sentence for the user about layers that the parts compute otherwise than the partition promises, or otherwise
        than the unsplit model; None if there are no such layers.
        """
        if self.microbatches == 1 or not self.facts.of_batch:
            return None
        return (
            f"Each of the {self.microbatches} micro-batches is computed with its own samples only by layers that "
            f"otherwise compute with all samples of a batch: {', '.join(self.facts.of_batch)}; use microbatches=1 for "
            "the results of the unsplit model."
        )

    def require_batch(self, samples: int) -> None:
        """Raise `ConfigurationError` unless the parts can compute a batch of so many samples."""
        check_microbatches(self.microbatches, samples)

    def largest_message(self, batch: int) -> int:
        """Return the bytes of the largest array that parts send to each other, for `batch` samples."""
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
    """The parameters with which more than one part computes."""

    @property
    def microbatches(self) -> int:
        return self.pipeline.microbatches

    def largest_message(self, batch: int) -> int:
        itemsize = np.dtype(self.engine.schema.dtype).itemsize
        lent = max((tie.lent.stop - tie.lent.start for tie in self.ties), default=0)
        return max(super().largest_message(batch), itemsize * lent)
