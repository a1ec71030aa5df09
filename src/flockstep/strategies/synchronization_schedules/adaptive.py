"""AdaComm, an adaptive synchronization schedule: replicas are averaged more often as the loss falls."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from flockstep.arrays.namespace import to_device_of
from flockstep.collectives.base import Collective
from flockstep.errors import require
from flockstep.nodes import Worker
from flockstep.strategies.synchronization_schedules.base import SynchronizationSchedule


@dataclass
class Losses:
    """A worker's state: the period H, the step at which H changes next, two learning rates, and the losses since the
    last average.
    """

    length: int
    change: int
    initial: float
    """The largest learning rate so far, eta_0."""
    rate: float
    """The learning rate at which the current period H was chosen."""
    total: float = 0.0
    count: int = 0
    first: float | None = None
    """The mean loss F_0 of all workers before their first average; None until the first average."""


@dataclass(frozen=True)
class Adaptive(SynchronizationSchedule):
    """AdaComm (Wang & Joshi 2019, section 4): few averages at first, more as the loss falls and noise dominates.

    Every `block` steps H ← ceil(sqrt(eta_0 / eta · F / F_0) · first), F being the mean training loss of all workers
    since their last average, eta the learning rate and eta_0 the largest learning rate so far, so that a warm-up does
    not shorten the period. If the new H is not below the H chosen at the same learning rate, H ← decay · H instead; a
    schedule that changes the rate at every step, such as cosine, leaves H to the formula alone. A smaller rate allows
    longer periods, here at most `first`: the authors saw training diverge when a decay of the rate made H jump. Their
    blocks are in seconds; steps, unlike clocks, are the same on every worker. Workers agree on F by averaging one
    number of 8 bytes.
    """

    needs_job: ClassVar[bool] = True
    first: int = 16
    block: int = 100
    decay: float = 0.5

    def __post_init__(self) -> None:
        for name in ("first", "block"):
            require(getattr(self, name) >= 1, name, ">= 1 steps", getattr(self, name), "16 and 100 are usual")
        require(0 < self.decay < 1, "decay", "in (0, 1)", self.decay, "0.5 is usual")

    @property
    def every_step(self) -> bool:
        """Whether the period H is always 1, which is the case if `first` is 1, because H never exceeds `first`."""
        return self.first == 1

    def start(self, me: Worker) -> Losses:
        """Return the initial state, with the period H = `first` for one block."""
        return Losses(self.first, self.block, me.lr, me.lr)

    def due(self, me: Worker, state: Losses, since: int) -> bool:
        """Record the loss of a step; return whether H steps have been taken since the last average."""
        state.total += me.loss
        state.count += 1
        return since >= state.length

    async def met(self, me: Worker, state: Losses, collective: Collective) -> None:
        """Choose the next period H. If the choice needs the loss, first average the loss over all workers."""
        state.initial = max(state.initial, me.lr)
        changes = me.step >= state.change
        if changes or state.first is None:
            loss = to_device_of(np.array([state.total / state.count]), me.params)
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
        """Return the next period H.

        Args:
            ratio: the value of eta_0 / eta · F / F_0.
            length: the current period H, in steps.
            same_rate: whether the current period was chosen at the current learning rate.
        """
        wanted = math.ceil(math.sqrt(ratio) * self.first) if 0 <= ratio < math.inf else length
        if wanted < length or not same_rate:
            return max(1, min(wanted, self.first))
        return max(1, int(self.decay * length))
