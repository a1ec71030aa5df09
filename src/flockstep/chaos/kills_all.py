"""All processes of a run are killed at once, as when the power is cut."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Self

import numpy as np

from flockstep.chaos.base import DisruptedRun, Disruption, Expected, Setting, middle, require_worker


@dataclass(frozen=True)
class KillsAll(Disruption):
    """SIGKILL ends all processes of the run, `delay` seconds after every worker has finished step `step`."""

    step: int = 20
    delay: float = 0.0

    @classmethod
    def drawn(cls, random: np.random.Generator, setting: Setting) -> Self | None:
        return cls(middle(random, setting.steps), round(random.uniform(0, 0.02), 4)) if setting.resumes else None

    def check(self, setting: Setting) -> None:
        require_worker(0, self.step, setting)

    def act(self, run: DisruptedRun) -> None:
        """Kill all processes."""
        run.wait(lambda: min(map(run.steps, range(run.setting.workers))) >= self.step)
        time.sleep(self.delay)
        if run.going:
            run.count += run.kill_all()

    def fired(self, run: DisruptedRun) -> bool:
        return run.count > run.setting.workers

    def expected(self, setting: Setting) -> Expected:
        return Expected((-9,), resumes=True)
