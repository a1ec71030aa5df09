"""The synchronization schedule of post-local SGD: an average after every step at first, and every H steps later."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flockstep.errors import ConfigurationError, require
from flockstep.nodes import Worker
from flockstep.strategies.synchronization_schedules.base import SynchronizationSchedule


@dataclass
class Phase:
    """A worker's state: whether the phase of local steps has begun, and the largest learning rate so far."""

    local: bool
    peak: float


@dataclass(frozen=True)
class PostLocal(SynchronizationSchedule):
    """Post-local SGD (Lin et al. 2020, section 3): synchronous for `start_at` steps (t'), then H = `period` local steps
    per average.

    Without `start_at`, the phase of local steps begins with the first step whose learning rate is below an earlier
    learning rate, as the authors advise. With start_at = inf, this phase never begins.
    """

    start_at: float | None = None
    period: int = 16

    def __post_init__(self) -> None:
        if self.start_at is not None and not self.start_at >= 0:
            raise ConfigurationError(
                f"start_at must be >= 0 steps, got {self.start_at}; leave it out for the learning rate's first decay"
            )
        require(self.period >= 1, "period", ">= 1 local steps", self.period, "16 is usual")

    @property
    def every_step(self) -> bool:
        """Whether replicas are averaged after every step of the run: True if the phase of local steps never begins, or
        if its period H is 1.
        """
        return self.period == 1 or self.start_at == math.inf

    def start(self, me: Worker) -> Phase:
        return Phase(False, me.lr)

    def due(self, me: Worker, state: Phase, since: int) -> bool:
        """Return True after every step of the synchronous phase, and after every H steps of the phase of local
        steps.
        """
        state.local |= me.lr < state.peak if self.start_at is None else me.run_step > self.start_at
        state.peak = max(state.peak, me.lr)
        return since >= (self.period if state.local else 1)
