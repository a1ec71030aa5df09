"""The contract of a partition."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from flockstep.errors import ConfigurationError
from flockstep.expression import Component


class Partition(Component):
    """How one replica of the model is split over workers, which then answer a request for a gradient together.

    Worker `replica * parts + part` holds part `part` of a replica. The workers that hold the same part form one
    data-parallel group, which runs the strategy on that part of the parameters.
    """

    noun: ClassVar[str] = "partition"

    @property
    @abstractmethod
    def parts(self) -> int:
        """Number of workers that hold one replica together."""

    @property
    def delays(self) -> str | None:
        """Sentence on gradients that the parts compute at earlier weights; None if there are none."""
        return None

    def replicas(self, workers: int) -> int:
        """Return the number of replicas that `workers` workers hold.

        Raises:
            ConfigurationError: the workers do not make up whole replicas.
        """
        if workers < 1 or workers % self.parts:
            raise ConfigurationError(
                f"the number of workers must be a multiple of {self.parts} for {self}, got {workers}; use "
                f"{max(1, workers // self.parts) * self.parts} workers"
            )
        return workers // self.parts
