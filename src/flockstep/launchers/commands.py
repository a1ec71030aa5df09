"""Runs in which a command, such as ssh or srun, starts each host and passes on standard input and output."""

from __future__ import annotations

import os
import sys
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from flockstep.launchers import task_entry
from flockstep.launchers.children import Script, begun, drain_all, reap, unbuffered
from flockstep.launchers.output import ERR, Sink
from flockstep.launchers.tasks import TaskGathering, TaskSpec
from flockstep.runtime.place import SECRET

GRACE = 5.0
"""Seconds that agents have to end by themselves after the run before their commands are killed."""


@dataclass(frozen=True)
class CommandGathering(TaskGathering):
    """The hosts of a run, on each of which a command starts the agent."""

    names: tuple[str, ...] = ()
    python: str = sys.executable
    """Path of the Python interpreter on the hosts."""

    @abstractmethod
    def command(self, name: str) -> list[str]:
        """Return the words of the command that starts the agent of a host."""

    def hint(self, name: str, code: int) -> str:
        """Return advice to the user if the command has failed with the given exit code; empty if there is no advice."""
        return ""

    def start(self, specs: Sequence[TaskSpec], stack: ExitStack) -> Callable[[], str | None]:
        """Start the agents; each agent reads its part, including the secret, from standard input."""
        sinks = [_LastLine(self.output.show) for _ in specs]
        environment = {name: value for name, value in os.environ.items() if name != SECRET}
        scripts: list[Script] = []
        stack.callback(_end, scripts)
        for name, spec, sink in zip(self.names, specs, sinks, strict=True):
            with tempfile.TemporaryFile() as file:
                file.write(task_entry.written(spec))
                file.seek(0)
                process = begun(self.command(name), unbuffered(environment), file)
                scripts.append(Script(process, (process.stdout, process.stderr), sink))
        return lambda: self._failed(scripts, sinks)

    def _failed(self, scripts: Sequence[Script], sinks: Sequence[_LastLine]) -> str | None:
        """Why an agent has ended before the run began; None if all are there."""
        for name, script, sink in zip(self.names, scripts, sinks, strict=True):
            code = script.exit_code()
            if code is not None:
                drain_all([script])
                by, reason = self.command(name)[0], sink.text or "no reason"
                return f"{by} {name} ended with exit code {code} before the run began: {reason}{self.hint(name, code)}"
        return None


class _LastLine:
    """Shows a host's output, and keeps the last line of its standard error."""

    def __init__(self, show: Sink):
        self._show = show
        self.text = ""

    def __call__(self, stream: int, data: bytes) -> None:
        """Take a part of the output."""
        if stream == ERR and data.strip():
            self.text = data.decode(errors="replace").strip().splitlines()[-1]
        self._show(stream, data)


def _end(scripts: Sequence[Script]) -> None:
    """Wait for the agents, which end with their connection to the coordinator."""
    reap(scripts, GRACE)
    drain_all(scripts)
