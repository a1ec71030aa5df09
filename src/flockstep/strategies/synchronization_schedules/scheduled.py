"""A synchronization schedule from a table of steps and periods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flockstep.errors import ConfigurationError
from flockstep.nodes import Worker
from flockstep.strategies.synchronization_schedules.base import SynchronizationSchedule


@dataclass(frozen=True)
class Scheduled(SynchronizationSchedule):
    """Periods from a table: H = periods[i] from step starts[i] on.

    Growing periods suit a falling learning rate (Haddadpour et al. 2019), shrinking periods a falling loss (Wang &
    Joshi 2019). The period H in force is the table's period for the last step taken.
    """

    periods: tuple[int, ...] = (1, 4, 16)
    starts: tuple[int, ...] = (0, 100, 200)

    def __post_init__(self) -> None:
        if not self.periods or min(self.periods) < 1:
            raise ConfigurationError(
                f"all periods must be >= 1 local steps, got {self.periods}; use for example (1, 4, 16)"
            )
        rising = all(a < b for a, b in zip(self.starts, self.starts[1:], strict=False))
        if len(self.starts) != len(self.periods) or self.starts[0] != 0 or not rising:
            raise ConfigurationError(
                f"starts must be step numbers in ascending order from 0, one for each of {len(self.periods)} periods, "
                f"got {self.starts}; use (0, 100, 200) with (1, 4, 16)"
            )

    @property
    def every_step(self) -> bool:
        return max(self.periods) == 1

    def due(self, me: Worker, state: Any, since: int) -> bool:
        begun = sum(me.run_step > start for start in self.starts)
        return since >= self.periods[begun - 1]
