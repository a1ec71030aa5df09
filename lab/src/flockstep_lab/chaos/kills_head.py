"""A disruption: a server with backups is killed, or stopped until it counts as dead."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np

from flockstep.errors import ConfigurationError, UnknownName
from flockstep.messages import node_name, server
from flockstep_lab.chaos.base import Disruption, Expected, Failpoint, Setting, after_promotion, middle

POINTS = ("message.received", "update.applied", "message.sent")


@dataclass(frozen=True)
class KillsHead(Disruption):
    """Server `index`, which has backups, receives SIGKILL (`how=kill`) or SIGSTOP (`stop`) when it reaches a point of
    the code for the `number`-th time; a stopped server counts as dead after the heartbeat timeout.
    """

    index: int = 0
    point: str = "update.applied"
    number: int = 50
    how: Literal["kill", "stop"] = "kill"

    @classmethod
    def drawn(cls, random: np.random.Generator, setting: Setting) -> Self | None:
        if not setting.strategy.replicas:
            return None
        number, how = middle(random, setting.steps) + int(random.integers(8)), random.random() < 0.3
        point = POINTS[random.integers(len(POINTS))]
        return cls(int(random.integers(setting.servers)), point, number, "stop" if how else "kill")

    def check(self, setting: Setting) -> None:
        if not setting.strategy.replicas:
            raise ConfigurationError(
                f"kills_head needs servers with backups, got {setting.strategy}; use kills_server, or replicas=1"
            )
        if not 0 <= self.index < setting.servers:
            raise ConfigurationError(f"{node_name(server(self.index))} does not exist in this run; name another server")
        if self.point not in POINTS:
            raise UnknownName.among("point of a server", self.point, POINTS)

    @property
    def failpoint(self) -> Failpoint:
        kind = signal.SIGKILL if self.how == "kill" else signal.SIGSTOP
        return Failpoint(f"server-{self.index}", self.point, self.number, kind)

    def expected(self, setting: Setting) -> Expected:
        return after_promotion(server(self.index))
