"""Meet the more often the smaller the loss is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from flockstep.collectives.base import Collective
from flockstep.errors import ConfigurationError
from flockstep.nodes import Worker
from flockstep.strategies.periods.base import Period


@dataclass
class Losses:
    """H, the step at which it changes next, and this worker's losses since the last meeting."""

    length: int
    change: int
    total: float = 0.0
    count: int = 0
    first: float | None = None
    """F_0, the mean loss of all workers before their first meeting."""


@dataclass(frozen=True)
class Adaptive(Period):
    """AdaComm (Wang & Joshi 2019, section 4): few meetings while much is to gain, more as noise begins to count.

    Every `block` steps H ← ceil(sqrt(F / F_0) first), F being the mean training loss of all workers since their last
    meeting; where that is no less than H was, H ← decay H. The authors' blocks are in seconds; steps, unlike clocks,
    are the same for everyone. Workers agree on F by averaging one number of 8 bytes.
    """

    needs_job: ClassVar[bool] = True
    first: int = 16
    block: int = 100
    decay: float = 0.5

    def __post_init__(self) -> None:
        for name in ("first", "block"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be >= 1 steps, got {getattr(self, name)}; 16 and 100 are usual")
        if not 0 < self.decay < 1:
            raise ConfigurationError(f"decay must be in (0, 1), got {self.decay}; 0.5 is usual")

    @property
    def every_step(self) -> bool:
        """H begins at 1, and never grows."""
        return self.first == 1

    def start(self, me: Worker) -> Losses:
        """H is `first` for one block."""
        return Losses(self.first, self.block)

    def due(self, me: Worker, state: Losses, since: int) -> bool:
        """After H steps."""
        state.total += me.loss
        state.count += 1
        return since >= state.length

    async def met(self, me: Worker, state: Losses, collective: Collective) -> None:
        """Agree on the loss where it is needed; choose H."""
        changes = me.step >= state.change
        if changes or state.first is None:
            loss = np.array([state.total / state.count])
            await collective.average(me, loss)
            now = float(loss[0])
            state.first = now if state.first is None else state.first
            if changes:
                state.change = me.step + self.block
                state.length = self.chosen(now / state.first if state.first > 0 else 1.0, state.length)
        state.total, state.count = 0.0, 0

    def chosen(self, ratio: float, length: int) -> int:
        """The next H, given F / F_0 and H."""
        wanted = math.ceil(math.sqrt(ratio) * self.first) if 0 <= ratio < math.inf else length
        return max(1, wanted if wanted < length else int(self.decay * length))
