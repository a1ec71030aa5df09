"""A grid of workers: every worker holds a rectangle of the plane of places of each divided layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flockstep.errors import ConfigurationError, require
from flockstep.partitions.base import Addressing, Division, Partition


@dataclass(frozen=True)
class SpatialGrid(Partition):
    """A grid of `rows` × `columns` workers, each of which computes a rectangle of the outputs of the locally connected
    layers, convolutions and poolings (Coates et al. 2013, COTS HPC; Dean et al. 2012, DistBelief), up to the first
    layer that cannot be divided, for example batch normalization. The first worker computes the layers from there on.

    A worker fetches the activations outside of its rectangle that its outputs read, each once, and sends their
    gradients back. Weights of a locally connected layer never travel; one worker lends those of a convolution. If
    a fully connected layer follows, it is divided by its inputs, and the first worker adds the terms.
    """

    divides: ClassVar[Division] = "tensors"
    part_noun: ClassVar[str] = "rectangle"
    addressing: ClassVar[Addressing] = "distributed array abstraction"

    rows: int
    columns: int

    def __post_init__(self) -> None:
        for name, value in (("rows", self.rows), ("columns", self.columns)):
            require(value >= 1, f"{name} of grid", ">= 1", value, "use for example 2")
        if self.parts < 2:
            raise ConfigurationError("a grid must have >= 2 workers, got 1 x 1; use partition=none for one worker")

    @property
    def parts(self) -> int:
        return self.rows * self.columns

    def part_name(self, part: int) -> str:
        row, column = divmod(part, self.columns)
        return f"{self.part_noun} ({row}, {column})"
