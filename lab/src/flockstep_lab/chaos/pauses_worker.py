"""A disruption: a worker is stopped for some seconds, then continues."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from typing import Self

import numpy as np

from flockstep.errors import ConfigurationError
from flockstep_lab.chaos.base import (
    DisruptedRun,
    Disruption,
    Expected,
    Failpoint,
    Setting,
    after_death,
    middle,
    require_worker,
)

BELOW, ABOVE = 0.3, 4.0
"""Pauses of at most `BELOW` heartbeat timeouts lose no worker; pauses of at least `ABOVE` heartbeat timeouts do."""


@dataclass(frozen=True)
class PausesWorker(Disruption):
    """SIGSTOP stops worker `worker` at its gradient number `step`, and SIGCONT continues it `seconds` later."""

    worker: int = 1
    step: int = 20
    seconds: float = 0.5

    @classmethod
    def drawn(cls, random: np.random.Generator, setting: Setting) -> Self | None:
        above = random.random() < 0.3 and (setting.survives or setting.resumes)
        seconds = setting.heartbeat * (ABOVE if above else random.uniform(0.05, BELOW))
        return cls(int(random.integers(setting.workers)), middle(random, setting.steps), round(seconds, 3))

    def check(self, setting: Setting) -> None:
        require_worker(self.worker, self.step, setting)
        if setting.heartbeat * BELOW < self.seconds < setting.heartbeat * ABOVE:
            raise ConfigurationError(
                f"seconds must be <= {BELOW * setting.heartbeat:g} or >= {ABOVE * setting.heartbeat:g} with a "
                f"heartbeat of {setting.heartbeat:g} s, got {self.seconds:g}; between these limits it is uncertain "
                f"whether the worker is lost"
            )

    @property
    def failpoint(self) -> Failpoint:
        return Failpoint(f"worker-{self.worker}", "gradient.computed", self.step, signal.SIGSTOP)

    def act(self, run: DisruptedRun) -> None:
        """Let the worker continue after the pause, unless the run has already ended the worker's process."""
        run.wait(lambda: run.signalled is not None)
        if (pid := run.signalled) is not None:
            time.sleep(self.seconds)
            run.send(signal.SIGCONT, pid)

    def expected(self, setting: Setting) -> Expected:
        return Expected() if self.seconds <= setting.heartbeat * BELOW else after_death(self.worker, setting)
