"""The interface of a disruption: how it affects a real run from outside, and how the disrupted run must end."""

from __future__ import annotations

import signal
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import numpy as np

from flockstep.errors import ConfigurationError, require
from flockstep.expression import Component
from flockstep.messages import Address, node_name, server
from flockstep.records.summary import Summary
from flockstep.strategies.base import Strategy


@dataclass(frozen=True)
class Setting:
    """Settings of a run that will be disrupted."""

    job: str
    strategy: Strategy
    workers: int
    steps: int
    """Number of local steps of each worker."""
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
        """Whether the strategy supports checkpoints, so that the run can be resumed."""
        return self.strategy.traits.restarts and self.strategy.traits.checkpoints

    @property
    def survives(self) -> bool:
        """Whether the other workers continue after a worker has died, according to the failure matrix."""
        return self.strategy.traits.deaths(self.workers) > 0

    @property
    def servers(self) -> int:
        """Number of servers of the run."""
        return self.strategy.servers_for(self.workers)

    @property
    def words(self) -> list[str]:
        """Command-line options that describe the run, for both `flockstep train` and `flockstep chaos`."""
        words = [self.job, "-s", str(self.strategy), "-n", str(self.workers), "--steps", str(self.steps)]
        words += ["--seed", str(self.seed), "--heartbeat", f"{self.heartbeat:g}"]
        words += ["--on-bad-gradient", self.on_bad_gradient]
        return words + [word for file in self.imports for word in ("--import", file)]


@dataclass(frozen=True)
class Failpoint:
    """A signal that a process of the run sends itself at a named point of the code."""

    who: str
    """Name of the process that receives the signal: worker-2, server-0, or launcher."""
    point: str
    number: int
    """Number of the visit to the point at which the process sends the signal: 1 for the first visit."""
    kind: signal.Signals = signal.SIGKILL


@dataclass(frozen=True)
class Expected:
    """The outcome that a disrupted run must have."""

    codes: tuple[int, ...] = (0,)
    """Exit codes with which the disrupted command may end."""
    lost: frozenset[int] = frozenset()
    """Names of the nodes that the run must report as lost, such as worker-2."""
    resumes: bool = False
    """Whether `flockstep resume` must be able to finish the run after the disrupted command has ended."""
    says: str = ""
    """Text that the disrupted command must have written to standard error."""
    refused: int = 0
    """Number of gradients that the run must have refused."""


class DisruptedRun(Protocol):
    """Operations on a run in progress, for disruptions: read its progress, find its processes, and send signals."""

    setting: Setting
    count: int
    """Number of signals that the disruption has sent to the run's processes."""

    @property
    def going(self) -> bool:
        """Whether the command that carries out the run is still running."""

    @property
    def pid(self) -> int:
        """Process id of the command that carries out the run."""

    @property
    def signalled(self) -> int | None:
        """Process id of the process that sent itself a signal at a failpoint; None if no process has."""

    @property
    def summary(self) -> Summary | None:
        """Summary of the run; None if the run has written none."""

    @property
    def has_checkpoint(self) -> bool:
        """Whether the run has a complete checkpoint."""

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` is true, the command has ended, or the command exceeds its time limit."""

    def steps(self, rank: int) -> int:
        """Return the number of steps of a worker that are in the record so far."""

    def process_of(self, name: str) -> int | None:
        """Return the process id of a node such as worker-2; None if the node has no running process."""

    def send(self, kind: signal.Signals, pid: int) -> bool:
        """Send a signal to a node; return whether the node's process existed."""

    def kill_all(self) -> int:
        """Kill all processes of the run; return their number."""


class Disruption(Component):
    """A disruption of one real run on this host, such as the death of a worker."""

    noun: ClassVar[str] = "disruption"

    @classmethod
    @abstractmethod
    def drawn(cls, random: np.random.Generator, setting: Setting) -> Self | None:
        """Draw a random disruption of this kind; None if this kind of disruption does not apply to the run."""

    @abstractmethod
    def expected(self, setting: Setting) -> Expected:
        """Return how the run must end after the disruption."""

    @property
    def failpoint(self) -> Failpoint | None:
        """Return the signal that a process sends itself at a named point of the code; None if the disruption comes
        from outside.
        """
        return None

    @property
    def words(self) -> tuple[str, ...]:
        """Return the options of `flockstep train` that cause the disruption; empty if options do not cause it."""
        return ()

    def check(self, setting: Setting) -> None:
        """Raise `ConfigurationError` unless the disruption can happen in the run."""

    def act(self, run: DisruptedRun) -> None:
        """Carry out the disruption on a run in progress."""

    def fired(self, run: DisruptedRun) -> bool:
        """Return whether the disruption happened before the run ended."""
        return run.signalled is not None


def require_worker(worker: int, step: int, setting: Setting) -> None:
    """Raise `ConfigurationError` unless the run has the worker, and the worker takes the step `step`."""
    if not 0 <= worker < setting.workers:
        raise ConfigurationError(f"worker {worker} does not exist in a run of {setting.workers}; name another rank")
    require(0 < step < setting.steps, "step", f"> 0 and < {setting.steps}", step, "choose another step")


def middle(random: np.random.Generator, steps: int) -> int:
    """Draw a step in the middle of a run, after the first checkpoints and long before the end."""
    return int(random.integers(steps * 3 // 8, steps * 5 // 8))


def after_server_death(index: int) -> Expected:
    """Return how a run with checkpoints must end after a server dies: the run continues from the newest checkpoint
    without a restart by the user.
    """
    node = server(index)
    return Expected(lost=frozenset({node}), says=f"{node_name(node)} was killed by SIGKILL")


def after_promotion(node: Address) -> Expected:
    """Return how a run must end after a server with backups dies: a backup takes the server's place."""
    return Expected(lost=frozenset({node}), says="its backup, continues in its place")


def after_death(worker: int, setting: Setting) -> Expected:
    """Return how a run must end after a worker dies."""
    if setting.survives:
        return Expected(lost=frozenset({worker}))
    return Expected((1,), frozenset({worker}), setting.resumes, f"worker {worker}")
