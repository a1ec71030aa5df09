"""A disruption: a worker is killed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from flockstep_lab.chaos.base import Disruption, Expected, Failpoint, Setting, after_death, middle, require_worker


@dataclass(frozen=True)
class KillsWorker(Disruption):
    """Worker `worker` is killed with SIGKILL as soon as it has computed its `step`-th gradient."""

    worker: int = 1
    step: int = 20

    @classmethod
    def drawn(cls, random: np.random.Generator, setting: Setting) -> Self | None:
        if not setting.survives and not setting.resumes:
            return None
        return cls(int(random.integers(setting.workers)), middle(random, setting.steps))

    def check(self, setting: Setting) -> None:
        require_worker(self.worker, self.step, setting)

    @property
    def failpoint(self) -> Failpoint:
        return Failpoint(f"worker-{self.worker}", "gradient.computed", self.step)

    def expected(self, setting: Setting) -> Expected:
        return after_death(self.worker, setting)
