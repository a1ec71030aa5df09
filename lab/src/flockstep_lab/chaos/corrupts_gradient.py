"""A disruption: a worker computes a gradient of NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from flockstep.errors import ConfigurationError
from flockstep_lab.chaos.base import DisruptedRun, Disruption, Expected, Setting, middle, require_worker


@dataclass(frozen=True)
class CorruptsGradient(Disruption):
    """Gradient number `step` of worker `worker` contains NaN, so `--on-bad-gradient skip` refuses the gradient."""

    worker: int = 1
    step: int = 20

    @classmethod
    def drawn(cls, random: np.random.Generator, setting: Setting) -> Self | None:
        if setting.on_bad_gradient != "skip":
            return None
        return cls(int(random.integers(setting.workers)), middle(random, setting.steps))

    def check(self, setting: Setting) -> None:
        require_worker(self.worker, self.step, setting)
        if setting.on_bad_gradient != "skip":
            raise ConfigurationError(
                "corrupts_gradient needs a run that continues after a bad gradient, got --on-bad-gradient "
                f"{setting.on_bad_gradient}; use --on-bad-gradient skip"
            )

    @property
    def words(self) -> tuple[str, ...]:
        return ("--fault", f"miscomputes({self.worker}, begin={self.step})")

    def fired(self, run: DisruptedRun) -> bool:
        """Return whether a gradient of the worker was refused."""
        summary = run.summary
        return summary is not None and any(one.rank == self.worker and one.refused for one in summary.per_worker)

    def expected(self, setting: Setting) -> Expected:
        return Expected(refused=1)
