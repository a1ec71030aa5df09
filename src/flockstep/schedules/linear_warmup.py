"""A schedule with a linear warm-up of the learning rate."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.schedules.base import Extent, Schedule, check_epochs, check_positive
from flockstep.schedules.constant import Constant


@dataclass(frozen=True)
class LinearWarmup(Schedule):
    """A linear warm-up: from `start` times the job's rate to the rate of the schedule `then`, within `warmup`
    epochs.
    """

    warmup: float = 5.0
    start: float = 0.1
    then: Schedule = Constant()

    def __post_init__(self) -> None:
        check_epochs("linear_warmup", self.warmup)
        check_positive("linear_warmup", start=self.start)

    def factor(self, epoch: float, run: Extent) -> float:
        """Return the factor on the learning rate: the linear ramp, then the factor of `then`, whose epochs count from
        the start of the run.
        """
        target = self.then.factor(epoch, run)
        return self.start + (target - self.start) * epoch / self.warmup if epoch < self.warmup else target

    @property
    def stages(self) -> tuple[tuple[float, float], ...]:
        return self.then.stages
