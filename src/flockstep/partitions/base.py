"""The interface of a partition."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from flockstep.collectives.base import Collective
from flockstep.errors import CompositionError, require
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


def check_ways(partition: str, ways: int, collective: Collective) -> None:
    """Raise an error unless there are several ways, whose collective works on flockstep's messages."""
    require(ways >= 2, f"ways of {partition}", ">= 2", ways, "use partition=none for one worker")
    if not collective.over_messages:
        raise CompositionError(
            f"the ways of {partition} communicate by flockstep's messages, but {collective} opens connections of its "
            "own among all processes of a run; use collective=ring, or another collective over flockstep's messages"
        )


def check_samples(partition: str, ways: int, samples: int) -> None:
    """Raise `ConfigurationError` unless a batch, or a micro-batch, has a sample for each way."""
    rule = f"at most the {samples} samples of a batch or micro-batch"
    require(
        ways <= samples, f"ways of {partition}", rule, ways, "use a larger batch, fewer micro-batches or fewer ways"
    )


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
        """Return the copies of its parameters that a part's worker stores besides those that it trains."""
        return 0

    def replicas(self, workers: int) -> int:
        """Return the replicas that `workers` workers hold; raise `ConfigurationError` for a fraction."""
        whole, rule = workers >= 1 and workers % self.parts == 0, f"a multiple of {self.parts} for {self}"
        near = max(1, workers // self.parts) * self.parts
        require(whole, "the number of workers", rule, workers, f"use {near} workers")
        return workers // self.parts


class CombinedPartition(Partition):
    """A partition `outer` whose parts are each held by the workers of `inner`: worker w of part p is part p W + w, for
    the W workers of `inner`. What the user is told of `outer` is told of both.
    """

    addressing: ClassVar[Addressing] = "distributed array abstraction"

    @property
    @abstractmethod
    def factors(self) -> tuple[Partition, Partition]:
        """The partitions `outer` and `inner`."""

    @property
    def parts(self) -> int:
        return self.factors[0].parts * self.factors[1].parts

    @property
    def delays(self) -> str | None:
        return self.factors[0].delays

    @property
    def notes(self) -> list[str]:
        return self.factors[0].notes

    @property
    def remembers(self) -> bool:
        return self.factors[0].remembers

    @property
    def mean_delay(self) -> float:
        return self.factors[0].mean_delay

    def part_name(self, part: int) -> str:
        outer, inner = self.factors
        return f"{inner.part_name(part % inner.parts)} of {outer.part_name(part // inner.parts)}"

    def batches_held(self, part: int) -> float:
        return self.factors[0].batches_held(part // self.factors[1].parts)

    def copies(self, part: int) -> int:
        return self.factors[0].copies(part // self.factors[1].parts)


@dataclass(frozen=True)
class Unsplit(Partition):
    """No partition: each worker holds the whole model."""

    @property
    def parts(self) -> int:
        return 1
