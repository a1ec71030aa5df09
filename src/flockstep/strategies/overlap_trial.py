"""A trial that measures whether a worker's steps are faster if gradients are sent during the backward pass or after
it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TRIED = 8
"""Number of successive steps that are timed with gradients sent during the backward pass, and again with gradients sent
after it.
"""
AGAIN = 2000
"""Number of steps after which the steps with and without overlap are timed again."""


@dataclass
class OverlapTrial:
    """The times of steps that send gradients during the backward pass, and of steps that send gradients after it.

    Sending during the backward pass hides the time of a slow link, but takes more processor time than a sum in shared
    memory. The faster choice depends on the link and on the number of cores.
    """

    steps: int = 0
    """Number of steps since the trial began."""
    during: float = math.inf
    """Duration in seconds of the shortest step whose gradient was sent during the backward pass."""
    after: float = math.inf
    """Duration in seconds of the shortest step whose gradient was sent after the backward pass."""
    overlaps: bool = True
    """Whether, as a result of the trial, gradients are sent during the backward pass."""

    @property
    def next(self) -> bool:
        """Whether the next step's gradient is sent during the backward pass."""
        return self.overlaps if self.complete else self.steps < TRIED

    @property
    def complete(self) -> bool:
        """Whether both kinds of steps have been timed: those with gradients sent during the backward pass, and those
        with gradients sent after it.
        """
        return self.steps >= 2 * TRIED

    def stepped(self, seconds: float) -> bool:
        """Count a step that took `seconds`; return whether all steps of the trial are done, so that the choice is
        due.
        """
        if self.steps < TRIED:
            self.during = min(self.during, seconds)
        elif not self.complete:
            self.after = min(self.after, seconds)
        self.steps += 1
        return self.steps == 2 * TRIED

    def choose(self, during: float, after: float) -> None:
        """Choose whether gradients are sent during the backward pass or after it, from the times of both, which must be
        equal on all workers.
        """
        self.overlaps = during <= after

    def renewed(self) -> OverlapTrial:
        """Return the trial for the next step: a new trial if the last trial is older than `AGAIN` steps."""
        return OverlapTrial() if self.steps >= AGAIN else self
