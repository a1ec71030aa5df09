"""A disruption: a server is killed."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Self

import numpy as np

from flockstep.errors import ConfigurationError
from flockstep.messages import node_name, server
from flockstep_lab.chaos.base import (
    DisruptedRun,
    Disruption,
    Expected,
    Setting,
    after_promotion,
    after_server_death,
    middle,
    require_worker,
)


@dataclass(frozen=True)
class KillsServer(Disruption):
    """Server `index` is killed with SIGKILL once every worker has finished step `step` and a checkpoint is complete."""

    index: int = 0
    step: int = 20

    @classmethod
    def drawn(cls, random: np.random.Generator, setting: Setting) -> Self | None:
        if not setting.servers or not setting.resumes or setting.strategy.replicas:
            return None
        return cls(int(random.integers(setting.servers)), middle(random, setting.steps))

    def check(self, setting: Setting) -> None:
        require_worker(0, self.step, setting)
        if not 0 <= self.index < setting.servers:
            raise ConfigurationError(
                f"{node_name(server(self.index))} does not exist in a run of {setting.strategy} with {setting.servers} "
                "servers; name another server, or choose a strategy with servers"
            )

    def act(self, run: DisruptedRun) -> None:
        """Kill the server's process with SIGKILL."""
        run.wait(lambda: run.has_checkpoint and min(map(run.steps, range(run.setting.workers))) >= self.step)
        if run.going and (pid := run.process_of(f"server-{self.index}")) is not None:
            run.count += run.send(signal.SIGKILL, pid)

    def fired(self, run: DisruptedRun) -> bool:
        return run.count == 1

    def expected(self, setting: Setting) -> Expected:
        return after_promotion(server(self.index)) if setting.strategy.replicas else after_server_death(self.index)
