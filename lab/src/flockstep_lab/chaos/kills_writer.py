"""A disruption: a worker or a server is killed while it writes its part of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from flockstep.errors import ConfigurationError, UnknownName
from flockstep.messages import node_name
from flockstep_lab.chaos.base import Disruption, Expected, Failpoint, Setting, after_promotion, after_server_death

POINTS = ("state.before_copy", "shard.written", "shard.renamed")


@dataclass(frozen=True)
class KillsWriter(Disruption):
    """Node `node` (servers are -1, -2, …) is killed with SIGKILL at a named point while it writes its `number`-th
    checkpoint.
    """

    node: int = 1
    point: str = "shard.written"
    number: int = 2

    @classmethod
    def drawn(cls, random: np.random.Generator, setting: Setting) -> Self | None:
        if not setting.resumes:
            return None
        node = int(random.integers(-setting.servers, setting.workers))
        return cls(node, POINTS[random.integers(len(POINTS))], int(random.integers(2, 4)))

    def check(self, setting: Setting) -> None:
        if not -setting.servers <= self.node < setting.workers:
            raise ConfigurationError(f"{node_name(self.node)} does not exist in this run; name another node")
        if self.point not in POINTS:
            raise UnknownName.among("point of a checkpoint", self.point, POINTS)

    @property
    def failpoint(self) -> Failpoint:
        return Failpoint(node_name(self.node).replace(" ", "-"), self.point, self.number)

    def expected(self, setting: Setting) -> Expected:
        lost = frozenset({self.node})
        if self.node >= 0 and setting.survives:
            return Expected(lost=lost)
        if self.node < 0 and setting.strategy.replicas:
            return after_promotion(self.node)
        if self.node < 0 and self.number > 1:  # there is a complete checkpoint
            return after_server_death(-1 - self.node)
        return Expected((1,), lost, True, node_name(self.node))
