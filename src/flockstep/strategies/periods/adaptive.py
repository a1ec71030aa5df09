"""Meet the more often the smaller the loss is."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from flockstep.arrays.namespace import beside
from flockstep.collectives.base import Collective
from flockstep.errors import ConfigurationError
from flockstep.expression import searched
from flockstep.nodes import Worker
from flockstep.strategies.periods.base import Period


@dataclass
class Losses:
    """H, the step at which it changes next, learning rates, and this worker's losses since the last meeting."""

    length: int
    change: int
    initial: float
    """eta_0, the largest learning rate so far."""
    rate: float
    """The learning rate that H was chosen for."""
    total: float = 0.0
    count: int = 0
    first: float | None = None
    """F_0, the mean loss of all workers before their first meeting."""


@dataclass(frozen=True)
class Adaptive(Period):
    """AdaComm (Wang & Joshi 2019, section 4): few meetings while much is to gain, more as noise begins to count.

    Every `block` steps H ← ceil(sqrt(eta_0 / eta · F / F_0) first), F being the mean training loss of all workers since
    their last meeting, eta the learning rate and eta_0 the largest so far, so that a warm-up shortens no period. Where
    that is no less than H was at the same learning rate, H ← decay H; a schedule that changes the rate at every step,
    such as cosine, leaves H to the formula alone. A smaller rate allows for longer periods, here at most `first`: the
    authors saw training diverge where a decay of the rate made H jump. Their blocks are in seconds; steps, unlike
    clocks, are the same on every worker. Workers agree on F by averaging one number of 8 bytes.
    """

    needs_job: ClassVar[bool] = True
    first: int = field(default=16, metadata=searched(2, 128))
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
        """H begins at 1, and never exceeds that."""
        return self.first == 1

    def start(self, me: Worker) -> Losses:
        """H is `first` for one block."""
        return Losses(self.first, self.block, me.lr, me.lr)

    def due(self, me: Worker, state: Losses, since: int) -> bool:
        """After H steps."""
        state.total += me.loss
        state.count += 1
        return since >= state.length

    async def met(self, me: Worker, state: Losses, collective: Collective) -> None:
        """Agree on the loss where it is needed; choose H."""
        state.initial = max(state.initial, me.lr)
        changes = me.step >= state.change
        if changes or state.first is None:
            loss = beside(np.array([state.total / state.count]), me.params)
            await collective.average(me, loss)
            now = float(loss[0])
            state.first = now if state.first is None else state.first
            if changes:
                state.change = me.step + self.block
                ratio = now / state.first if state.first > 0 else 1.0
                ratio *= state.initial / me.lr if me.lr > 0 else 1.0
                state.length = self.chosen(ratio, state.length, me.lr == state.rate)
                state.rate = me.lr
        state.total, state.count = 0.0, 0

    def chosen(self, ratio: float, length: int, same_rate: bool = True) -> int:
        """The next H, given eta_0 / eta · F / F_0, H, and whether H was chosen for the learning rate of now."""
        wanted = math.ceil(math.sqrt(ratio) * self.first) if 0 <= ratio < math.inf else length
        if wanted < length or not same_rate:
            return max(1, min(wanted, self.first))
        return max(1, int(self.decay * length))
