"""A run is asked to end, as by a scheduler that needs the machine."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from typing import Self

import numpy as np

from flockstep.chaos.base import DisruptedRun, Disruption, Expected, Setting, middle, require_worker


@dataclass(frozen=True)
class Terminates(Disruption):
    """SIGTERM ends the run, `delay` seconds after every worker has finished step `step`."""

    step: int = 20
    delay: float = 0.0

    @classmethod
    def drawn(cls, random: np.random.Generator, setting: Setting) -> Self | None:
        step = middle(random, setting.steps) * 2 // 3
        return cls(step, round(random.uniform(0, 0.02), 4)) if setting.resumes else None

    def check(self, setting: Setting) -> None:
        require_worker(0, self.step, setting)

    def act(self, run: DisruptedRun) -> None:
        """Send SIGTERM to the command."""
        run.wait(lambda: min(map(run.steps, range(run.setting.workers))) >= self.step)
        time.sleep(self.delay)
        if run.going:
            run.count += run.send(signal.SIGTERM, run.pid)

    def fired(self, run: DisruptedRun) -> bool:
        return run.count == 1

    def expected(self, setting: Setting) -> Expected:
        return Expected((130,), resumes=True)
