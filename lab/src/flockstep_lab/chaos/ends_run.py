"""A disruption: the whole run is ended from outside, as by a power failure or by a scheduler that needs the machine."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np

from flockstep_lab.chaos.base import DisruptedRun, Disruption, Expected, Setting, middle, require_worker


@dataclass(frozen=True)
class EndsRun(Disruption):
    """All processes of the run are killed with SIGKILL (`how=kill`), or SIGTERM asks the run to end (`term`), `delay`
    seconds after every worker has finished step `step`.
    """

    step: int = 20
    delay: float = 0.0
    how: Literal["kill", "term"] = "kill"

    @classmethod
    def drawn(cls, random: np.random.Generator, setting: Setting) -> Self | None:
        if not setting.resumes:
            return None
        step, kills = middle(random, setting.steps), random.random() < 0.5
        delay = round(random.uniform(0, 0.02), 4)
        return cls(step, delay, "kill") if kills else cls(step * 2 // 3, delay, "term")

    def check(self, setting: Setting) -> None:
        require_worker(0, self.step, setting)

    def act(self, run: DisruptedRun) -> None:
        """Send SIGKILL to all processes of the run, or SIGTERM to its command."""
        run.wait(lambda: min(map(run.steps, range(run.setting.workers))) >= self.step)
        time.sleep(self.delay)
        if run.going:
            run.count += run.kill_all() if self.how == "kill" else run.send(signal.SIGTERM, run.pid)

    def fired(self, run: DisruptedRun) -> bool:
        return run.count > run.setting.workers if self.how == "kill" else run.count == 1

    def expected(self, setting: Setting) -> Expected:
        return Expected((-9 if self.how == "kill" else 130,), resumes=True)
