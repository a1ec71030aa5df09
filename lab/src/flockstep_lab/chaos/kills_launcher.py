"""A disruption: the launcher is killed while it takes a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from flockstep.errors import UnknownName
from flockstep_lab.chaos.base import Disruption, Expected, Failpoint, Setting

POINTS = ("checkpoint.begun", "states.copied", "manifest.begun", "manifest.renamed", "checkpoint.complete")


@dataclass(frozen=True)
class KillsLauncher(Disruption):
    """The launcher is killed with SIGKILL when it reaches a point of the code for the `number`-th time."""

    point: str = "manifest.begun"
    number: int = 2

    @classmethod
    def drawn(cls, random: np.random.Generator, setting: Setting) -> Self | None:
        return cls(POINTS[random.integers(len(POINTS))], int(random.integers(1, 4))) if setting.resumes else None

    def check(self, setting: Setting) -> None:
        if self.point not in POINTS:
            raise UnknownName.among("point of the launcher", self.point, POINTS)

    @property
    def failpoint(self) -> Failpoint:
        return Failpoint("launcher", self.point, self.number)

    def expected(self, setting: Setting) -> Expected:
        return Expected((-9,), resumes=True)
