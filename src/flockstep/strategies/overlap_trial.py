"""Measures whether it is faster to send gradients during the backward pass or after it."""

from __future__ import annotations

import math
from dataclasses import dataclass

TRIED = 8
"""Number of successive steps that are timed with messages during the backward pass, and then with messages after it."""
AGAIN = 2000
"""Number of steps after which exchange during and exchange after the backward pass are timed again."""


@dataclass
class OverlapTrial:
    """The times of steps whose gradients travel during the backward pass, and of steps whose gradients travel after it.

    Messages that are handled during the backward pass hide the time of a slow link, but take more processor time than a
    sum in shared memory. Which of the two is faster depends on the link and on the number of cores.
    """

    steps: int = 0
    """Number of steps since the trial began."""
    during: float = math.inf
    """Shortest step with an exchange during the backward pass, in seconds."""
    after: float = math.inf
    """Shortest step with an exchange after the backward pass, in seconds."""
    overlaps: bool = True
    """The choice: whether gradients are sent during the backward pass."""

    @property
    def next(self) -> bool:
        """Whether the next step's gradient is sent during the backward pass."""
        return self.overlaps if self.complete else self.steps < TRIED

    @property
    def complete(self) -> bool:
        """Whether exchange during the backward pass and exchange after it have both been timed."""
        return self.steps >= 2 * TRIED

    def stepped(self, seconds: float) -> bool:
        """Count a step that took `seconds`; return whether all trial steps are done and the choice is due."""
        if self.steps < TRIED:
            self.during = min(self.during, seconds)
        elif not self.complete:
            self.after = min(self.after, seconds)
        self.steps += 1
        return self.steps == 2 * TRIED

    def choose(self, during: float, after: float) -> None:
        """Choose between the two from their times, which must be equal on all workers."""
        self.overlaps = during <= after

    def renewed(self) -> OverlapTrial:
        """Return the trial for the next step: a new trial if the last trial is older than `AGAIN` steps."""
        return OverlapTrial() if self.steps >= AGAIN else self
