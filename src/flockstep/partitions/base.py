"""The interface of a partition."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from flockstep import registry
from flockstep.errors import require
from flockstep.expression import Component

Division = Literal["nothing", "layers", "tensors", "state"]
"""Division of a model among the workers of a replica. "layers": whole layers, as in a pipeline (vertical partitioning);
"tensors": the arrays of each layer (horizontal partitioning); "state": stored parameters, gradients and optimizer
state, while each worker computes the whole model.
"""
Addressing = Literal["none", "p2p mesh", "distributed array abstraction"]
"""Topology of one replica, as in table 1 of Langer et al. (2020): "p2p mesh" if a part sends messages to certain other
parts; "distributed array abstraction" if a part works on its slice of an array that all parts hold together.
"""


class Partition(Component):
    """A way to split one replica of the model over several workers, which then compute each gradient together.

    Worker `replica * parts + part` holds part `part` of a replica. The workers that hold the same part form one
    data-parallel group, which runs the strategy on that part of the parameters.
    """

    noun: ClassVar[str] = "partition"
    divides: ClassVar[Division] = "nothing"
    """Division of the model among the workers of a replica: layers, tensors or state."""
    part_noun: ClassVar[str] = "part"
    """Noun for a part of the model: "stage", "way", "shard" or "rectangle"."""
    addressing: ClassVar[Addressing] = "none"
    """Topology of the messages between the parts of a replica; see `Addressing`."""

    @property
    @abstractmethod
    def parts(self) -> int:
        """Number of workers that hold one replica together."""

    @property
    def together(self) -> int:
        """Number of workers of a replica that must be on one host; 1 if they may be anywhere."""
        return 1

    @property
    def splits_model(self) -> bool:
        """Whether a worker computes only a part of the model: model parallelism (Langer et al. 2020, 3.1.1)."""
        return self.divides in ("layers", "tensors")

    @property
    def delays(self) -> str | None:
        """What to tell the user of gradients computed with outdated weights; None if all are current."""
        return None

    @property
    def notes(self) -> list[str]:
        """Sentences for the user about what differs from training without the partition."""
        return [] if self.delays is None else [self.delays]

    @property
    def remembers(self) -> bool:
        """Whether the parts store activations of earlier steps."""
        return False

    @property
    def mean_delay(self) -> float:
        """Mean age, in updates, of the weights with which a gradient is computed, as far as the partition causes it."""
        return 0.0

    def part_name(self, part: int) -> str:
        """Return the name of a part for the user, such as "stage 1"."""
        return f"{self.part_noun} {part}"

    def batches_held(self, part: int) -> float:
        """Return the number of batches whose activations the worker of a part stores at the same time, for its part of
        the model: 1 if it computes whole batches one after another.
        """
        return 1.0

    def copies(self, part: int) -> int:
        """Return the copies of its parameters that a part's worker stores besides those that it trains: one while it
        computes a step.
        """
        return 0 if self.divides == "nothing" else 1

    def replicas(self, workers: int) -> int:
        """Return the replicas that `workers` workers hold; raise `ConfigurationError` for a fraction."""
        whole, rule = workers >= 1 and workers % self.parts == 0, f"a multiple of {self.parts} for {self}"
        require(whole, "the number of workers", rule, workers, f"use {self.parts}, or a multiple of it")
        return workers // self.parts


@dataclass(frozen=True)
class Unsplit(Partition):
    """No partition: each worker holds the whole model."""

    @property
    def parts(self) -> int:
        return 1


@dataclass(frozen=True)
class JointPartition(Partition):
    """A partition by PyTorch over `ways` workers of one host, which together compute each replica."""

    addressing: ClassVar[Addressing] = "distributed array abstraction"

    ways: int

    def __post_init__(self) -> None:
        name = f"ways of {registry.name_of(type(self))}"
        require(self.ways >= 2, name, ">= 2", self.ways, "use partition=none for one worker")

    @property
    def parts(self) -> int:
        return self.ways

    @property
    def together(self) -> int:
        return self.ways

    @property
    @abstractmethod
    def shares(self) -> int:
        """Number of shares into which the ways divide the samples of a batch."""

    def require_samples(self, samples: int) -> None:
        """Raise `ConfigurationError` unless a batch has a sample for each share."""
        rule = f"at most the {samples} samples of a batch"
        require(self.shares <= samples, f"ways of {self}", rule, self.ways, "use a larger batch or fewer ways")
