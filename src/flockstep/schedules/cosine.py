"""A schedule whose learning rate follows half a period of a cosine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flockstep.errors import require
from flockstep.schedules.base import Extent, Schedule, check_positive


@dataclass(frozen=True)
class Cosine(Schedule):
    """A cosine (Loshchilov & Hutter 2017): scale × (floor + (1 - floor) (1 + cos(π t)) / 2), t the fraction of
    the run.
    """

    floor: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_positive("cosine", scale=self.scale)
        require(0 <= self.floor <= 1, "floor of cosine", "in [0, 1]", self.floor, "use 0 to end at 0")

    def factor(self, epoch: float, run: Extent) -> float:
        """Return the factor by which the learning rate is multiplied; after the planned run, scale × floor."""
        share = min(epoch / run.epochs, 1.0)
        return self.scale * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * share)) / 2)
