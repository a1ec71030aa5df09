"""A schedule whose learning rate does not change."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.schedules.base import Extent, Schedule, check_positive


@dataclass(frozen=True)
class Constant(Schedule):
    """A constant learning rate: `scale` times the job's learning rate, from beginning to end."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        check_positive("constant", scale=self.scale)

    def factor(self, epoch: float, run: Extent) -> float:
        return self.scale
