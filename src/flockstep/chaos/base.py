"""The contract of a disruption: what happens to a real run from outside, and how the run must end."""

from __future__ import annotations

import signal
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import numpy as np

from flockstep.errors import ConfigurationError
from flockstep.expression import Component
from flockstep.messages import Address, node_name, server
from flockstep.records.summary import Summary
from flockstep.strategies.base import Strategy


@dataclass(frozen=True)
class Setting:
    """The run that is disrupted."""

    job: str
    strategy: Strategy
    workers: int
    steps: int
    """Local steps of each worker."""
    seed: int
    heartbeat: float
    """Seconds without an answer after which a node counts as lost."""
    on_bad_gradient: str = "stop"
    imports: tuple[str, ...] = ()

    @property
    def every(self) -> int:
        """Number of steps of a worker between two checkpoints."""
        return max(1, self.steps // 8)

    @property
    def resumes(self) -> bool:
        """Whether the strategy has checkpoints."""
        return self.strategy.traits.restarts and self.strategy.traits.checkpoints

    @property
    def survives(self) -> bool:
        """Whether the other workers go on after a worker has died, as the failure matrix says."""
        return self.strategy.traits.deaths(self.workers) > 0

    @property
    def servers(self) -> int:
        """Number of servers of the run."""
        return self.strategy.servers_for(self.workers)

    @property
    def words(self) -> list[str]:
        """The options of `flockstep train` and of `flockstep chaos` that describe the run."""
        words = [self.job, "-s", str(self.strategy), "-n", str(self.workers), "--steps", str(self.steps)]
        words += ["--seed", str(self.seed), "--heartbeat", f"{self.heartbeat:g}"]
        words += ["--on-bad-gradient", self.on_bad_gradient]
        return words + [word for file in self.imports for word in ("--import", file)]


@dataclass(frozen=True)
class Failpoint:
    """A signal that a process of the run sends itself at a named point of the code."""

    who: str
    """Name of the process: worker-2, server-0, or launcher."""
    point: str
    number: int
    """How many times the process has come to the point."""
    kind: signal.Signals = signal.SIGKILL


@dataclass(frozen=True)
class Expected:
    """How the disrupted run must end."""

    codes: tuple[int, ...] = (0,)
    """Allowed exit codes of the first command."""
    lost: frozenset[int] = frozenset()
    """The nodes that the run must report as lost."""
    resumes: bool = False
    """Whether the run must then go on with `flockstep resume`, and finish."""
    says: str = ""
    """Text that the command must have written to standard error."""
    refused: int = 0
    """Number of gradients that must have been refused."""


class DisruptedRun(Protocol):
    """The operations of a run that has begun which a disruption needs."""

    setting: Setting
    count: int
    """Number of signals that the disruption has sent from outside."""

    @property
    def going(self) -> bool:
        """Whether the command that carries out the run has not ended yet."""

    @property
    def pid(self) -> int:
        """Process id of the command."""

    @property
    def signalled(self) -> int | None:
        """Id of the process that has sent itself a signal; None if none has."""

    @property
    def summary(self) -> Summary | None:
        """Summary of the run; None if it has none."""

    @property
    def has_checkpoint(self) -> bool:
        """Whether the run has a complete checkpoint."""

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition is true, or the command has ended or hangs."""

    def steps(self, rank: int) -> int:
        """Number of steps that a worker has written so far."""

    def process_of(self, name: str) -> int | None:
        """Process id of a node such as worker-2; None if it does not run."""

    def send(self, kind: signal.Signals, pid: int) -> bool:
        """Send a signal; return whether the process was there."""

    def kill_all(self) -> int:
        """Kill all processes of the run; return their number."""


class Disruption(Component):
    """A disruption of one real run on this host."""

    noun: ClassVar[str] = "disruption"

    @classmethod
    @abstractmethod
    def drawn(cls, random: np.random.Generator, setting: Setting) -> Self | None:
        """Draw a disruption of this kind; None if it does not apply to the run."""

    @abstractmethod
    def expected(self, setting: Setting) -> Expected:
        """How the run must end."""

    @property
    def failpoint(self) -> Failpoint | None:
        """The signal at a named point of the code; None if the disruption comes from outside."""
        return None

    @property
    def words(self) -> tuple[str, ...]:
        """Options of `flockstep train` that cause the disruption."""
        return ()

    def check(self, setting: Setting) -> None:
        """Raise `ConfigurationError` unless the disruption can happen in the run."""

    def act(self, run: DisruptedRun) -> None:
        """Disrupt a run that has begun."""

    def fired(self, run: DisruptedRun) -> bool:
        """Whether the disruption has happened, before the run had ended."""
        return run.signalled is not None


def require_worker(worker: int, step: int, setting: Setting) -> None:
    """Raise `ConfigurationError` unless the worker exists and takes the step."""
    if not 0 <= worker < setting.workers:
        raise ConfigurationError(f"worker {worker} does not exist in a run of {setting.workers}; name another rank")
    if not 0 < step < setting.steps:
        raise ConfigurationError(f"step must be > 0 and < {setting.steps}, got {step}; choose another step")


def middle(random: np.random.Generator, steps: int) -> int:
    """A step in the middle of a run, after the first checkpoints and long before the end."""
    return int(random.integers(steps * 3 // 8, steps * 5 // 8))


def after_server_death(index: int) -> Expected:
    """How a run with checkpoints must end in which a server dies: by itself it goes on from the newest checkpoint."""
    return Expected(says=f"{node_name(server(index))} was killed by SIGKILL")


def after_promotion(node: Address) -> Expected:
    """How a run must end in which a server dies that has backups: one of them continues in its place."""
    return Expected(lost=frozenset({node}), says="its backup, continues in its place")


def after_death(worker: int, setting: Setting) -> Expected:
    """How a run must end in which a worker dies."""
    if setting.survives:
        return Expected(lost=frozenset({worker}))
    return Expected((1,), frozenset({worker}), setting.resumes, f"worker {worker}")
