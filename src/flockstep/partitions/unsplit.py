"""No partition: each worker holds a whole replica of the model."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.partitions.base import Partition


@dataclass(frozen=True)
class Unsplit(Partition):
    """No partition: each worker holds the whole model."""

    @property
    def parts(self) -> int:
        return 1
