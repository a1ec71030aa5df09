"""The initial values of a split model; the launcher sends each node the values of its part."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flockstep.errors import ConfigurationError
from flockstep.frameworks.stages import SplitModel
from flockstep.messages import Address
from flockstep.partitions.base import Partition
from flockstep.partitions.split_facts import SplitFacts


@dataclass(frozen=True, eq=False)
class InitialParts:
    """The initial values of each part of a model, in a file without a name, so that no process holds them in memory."""

    partition: Partition
    facts: SplitFacts
    sizes: tuple[int, ...]
    """Number of elements of the parameters of each part."""
    values: tuple[npt.NDArray[np.uint8], ...]
    """For each part, the bytes that `ModelPart.values` returns."""
    parameter_bytes: tuple[int, ...]
    """Number of bytes that the parameters take at the beginning of each part's values."""

    @classmethod
    def of(cls, split: SplitModel) -> InitialParts:
        """Write the values of all parts of a model to the file.

        Raises:
            ConfigurationError: the disk is full.
        """
        try:
            with tempfile.TemporaryFile() as file:
                for part in split.parts:
                    file.write(part.values().data)
                file.flush()
                whole = np.asarray(np.memmap(file, np.uint8, "r"))
        except OSError as error:
            raise ConfigurationError(
                f"the initial values of the parts could not be written to {tempfile.gettempdir()}: {error.strerror}; "
                "free some space there, or set TMPDIR to another folder"
            ) from None
        stops = np.cumsum([part.held_bytes for part in split.parts])[:-1]
        lengths = tuple(part.schema.nbytes for part in split.parts)
        return cls(split.partition, split.facts, split.sizes, tuple(np.split(whole, stops)), lengths)

    @property
    def delayed(self) -> bool:
        """Whether micro-batches are in flight at the end of every step, as in a pipeline without flushes."""
        return self.partition.delays is not None

    def of_node(self, address: Address, servers: int) -> npt.NDArray[np.uint8]:
        """Return the initial values for a node; `servers` is the number of servers of each part, which hold only
        parameters.
        """
        if address >= 0:
            return self.values[address % len(self.sizes)]
        part = (-1 - address) // servers
        return self.values[part][: self.parameter_bytes[part]]
