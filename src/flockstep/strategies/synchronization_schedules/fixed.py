"""A fixed synchronization period: an average every H steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flockstep.errors import require
from flockstep.nodes import Worker
from flockstep.strategies.synchronization_schedules.base import SynchronizationSchedule


@dataclass(frozen=True)
class Fixed(SynchronizationSchedule):
    """A fixed period (Stich 2019): the number of steps between two averages never changes."""

    period: int = 10

    def __post_init__(self) -> None:
        require(self.period >= 1, "period", ">= 1 local steps", self.period, "use 1 to average after every step")

    @property
    def every_step(self) -> bool:
        return self.period == 1

    def due(self, me: Worker, state: Any, since: int) -> bool:
        return since >= self.period
