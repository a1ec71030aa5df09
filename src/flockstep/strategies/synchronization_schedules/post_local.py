"""Post-local SGD's period: an average after every step at first, and every H steps later."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from flockstep.errors import ConfigurationError
from flockstep.expression import searched
from flockstep.nodes import Worker
from flockstep.strategies.synchronization_schedules.base import SynchronizationSchedule


@dataclass
class Phase:
    """A worker's state: whether the second phase has begun, and the largest learning rate so far."""

    local: bool
    peak: float


@dataclass(frozen=True)
class PostLocal(SynchronizationSchedule):
    """Post-local SGD (Lin et al. 2020, section 3): synchronous for `start_at` steps (t'), then H = `period` local steps
    per average.

    Without `start_at`, the second phase begins with the first step whose learning rate is below an earlier one, as the
    authors advise; with `inf`, the second phase never begins.
    """

    start_at: float | None = None
    period: int = field(default=16, metadata=searched(1, 128))

    def __post_init__(self) -> None:
        if self.start_at is not None and not self.start_at >= 0:
            raise ConfigurationError(
                f"start_at must be >= 0 steps, got {self.start_at}; leave it out for the learning rate's first decay"
            )
        if self.period < 1:
            raise ConfigurationError(f"period must be >= 1 local steps, got {self.period}; 16 is usual")

    @property
    def every_step(self) -> bool:
        """True if there is no second phase, or if H = 1 in the second phase."""
        return self.period == 1 or self.start_at == math.inf

    def start(self, me: Worker) -> Phase:
        return Phase(False, me.lr)

    def due(self, me: Worker, state: Phase, since: int) -> bool:
        """Return True after each step of the first phase, and after every H steps of the second phase."""
        state.local |= me.lr < state.peak if self.start_at is None else me.run_step > self.start_at
        state.peak = max(state.peak, me.lr)
        return since >= (self.period if state.local else 1)
