"""A disruption: a worker is slow for some seconds."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from typing import Self

import numpy as np

from flockstep_lab.chaos.base import DisruptedRun, Disruption, Expected, Setting, middle, require_worker

STOPPED, RUNNING = 0.04, 0.01
"""STOPPED: seconds for which the worker is stopped. RUNNING: seconds for which the worker then runs. The two periods
alternate.
"""
LEAST = 3
"""Number of times that the worker must have been stopped for the disruption to count."""


@dataclass(frozen=True)
class SlowsWorker(Disruption):
    """From step `step` on, worker `worker` runs only a fifth of the time, for `seconds` seconds."""

    worker: int = 1
    step: int = 20
    seconds: float = 0.5

    @classmethod
    def drawn(cls, random: np.random.Generator, setting: Setting) -> Self | None:
        step = middle(random, setting.steps) * 2 // 3
        return cls(int(random.integers(setting.workers)), step, round(random.uniform(0.3, 1.0), 3))

    def check(self, setting: Setting) -> None:
        require_worker(self.worker, self.step, setting)

    def act(self, run: DisruptedRun) -> None:
        """Stop and continue the worker alternately."""
        run.wait(lambda: run.steps(self.worker) >= self.step)
        until = time.monotonic() + self.seconds
        while time.monotonic() < until and (pid := run.process_of(f"worker-{self.worker}")) is not None:
            run.count += run.send(signal.SIGSTOP, pid)
            time.sleep(STOPPED)
            run.send(signal.SIGCONT, pid)
            time.sleep(RUNNING)

    def fired(self, run: DisruptedRun) -> bool:
        """Return whether the worker was stopped at least `LEAST` times."""
        return run.count >= LEAST

    def expected(self, setting: Setting) -> Expected:
        return Expected()
