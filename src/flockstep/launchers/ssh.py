"""Runs whose hosts are reached by ssh: this process coordinates, and starts an agent on each host."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from flockstep.errors import ConfigurationError
from flockstep.launchers import task_entry
from flockstep.launchers.children import Script, drain_all, reap
from flockstep.launchers.meeting import TIMEOUT, Meeting
from flockstep.launchers.output import ERR, SHOWN, Output, Sink
from flockstep.launchers.tasks import TaskGathering, TaskSpec
from flockstep.records.config import RunConfig

GRACE = 5.0
"""Seconds within which the agents end by themselves after the run."""
SSH_FAILED = 255
"""Exit code of ssh if it could not connect."""


@dataclass(frozen=True)
class SshGathering(TaskGathering):
    """The hosts that ssh reaches, each with a number of workers."""

    names: tuple[str, ...] = ()
    shares: tuple[int, ...] = ()
    """Workers of each host."""
    command: tuple[str, ...] = ("ssh",)
    python: str = sys.executable
    """Python on the hosts."""

    def placement(self, workers: int) -> dict[int, range]:
        """Node → its ranks, as many as `shares` gives it."""
        ends = [sum(self.shares[:node]) for node in range(self.nodes + 1)]
        return {node: range(ends[node], ends[node + 1]) for node in range(self.nodes)}

    def over(self, config: RunConfig) -> RunConfig:
        """The configuration with the transport and the workers of these hosts."""
        return dataclasses.replace(super().over(config), workers=sum(self.shares))

    def start(self, specs: Sequence[TaskSpec], stack: ExitStack) -> Callable[[], str | None]:
        """Start the agents; each reads its part, secret included, from standard input."""
        # The agent finds files and modules where this process does.
        remote = f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.quote(self.python)} -m {task_entry.__name__}"
        sinks = [_LastLine(self.output.show) for _ in specs]
        scripts: list[Script] = []
        stack.callback(_end, scripts)
        for name, spec, sink in zip(self.names, specs, sinks, strict=True):
            with tempfile.TemporaryFile() as file:
                file.write(task_entry.written(spec))
                file.seek(0)
                command = [*self.command, "-T", "-o", "BatchMode=yes", name, remote]
                scripts.append(Script(command, dict(os.environ), sink, stdin=file))
        return lambda: _failed(self.names, scripts, sinks)


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


def _failed(names: Sequence[str], scripts: Sequence[Script], sinks: Sequence[_LastLine]) -> str | None:
    """Why an agent has ended before the run began; None if all are there."""
    for name, script, sink in zip(names, scripts, sinks, strict=True):
        code = script.exit_code()
        if code is not None:
            drain_all([script])
            hint = f"; try: ssh {name} true" if code == SSH_FAILED else ""
            return f"ssh {name} ended with exit code {code} before the run began: {sink.text or 'no reason'}{hint}"
    return None


def _end(scripts: Sequence[Script]) -> None:
    """Wait for the agents, which end with their connection to the coordinator."""
    reap(scripts, GRACE)
    drain_all(scripts)


@contextlib.contextmanager
def ssh_hosts(
    hosts: str,
    ssh: str = "ssh",
    python: str = sys.executable,
    timeout: float = TIMEOUT,
    own: str = "",
    arguments: Sequence[str] = (),
    output: Output = SHOWN,
) -> Iterator[SshGathering]:
    """Context manager: hosts that ssh reaches without a password.

    Args:
        hosts: names and numbers of workers, as in "a:4,b:4"; a name alone has one worker.
        ssh: the command, with its options.
        python: path of Python on the hosts, where flockstep is installed.
        timeout: seconds to wait for the hosts.
        own: address of this host that the others connect to; empty: the one from which the first host is reached.
        arguments: arguments of a launched script.
        output: which of the scripts' output is shown, and how.

    Raises:
        ConfigurationError: `hosts` is not such a list, or ssh is not installed, or a host's name does not resolve.
    """
    names, shares = _parsed(hosts)
    command = tuple(shlex.split(ssh))
    address = own or _own_address(command, names[0])
    meeting = Meeting(address, 0, secrets.token_bytes(32), timeout)
    yield SshGathering(
        meeting,
        len(names),
        arguments=tuple(arguments),
        output=output,
        names=names,
        shares=shares,
        command=command,
        python=python,
    )


def _parsed(hosts: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names of the hosts, and their numbers of workers."""
    names, shares = [], []
    for text in hosts.split(","):
        name, colon, share = text.strip().rpartition(":")
        name, share = (name, share) if colon else (share, "1")
        if not name or name.startswith("-") or not share.isdecimal() or not int(share):
            raise ConfigurationError(
                f"--hosts must list hosts, each with its number of workers, got {hosts!r}; write it like a:4,b:4"
            )
        names.append(name)
        shares.append(int(share))
    if len(set(names)) < len(names):
        raise ConfigurationError(f"--hosts names a host twice, got {hosts!r}; give each host all its workers at once")
    return tuple(names), tuple(shares)


def _own_address(ssh: Sequence[str], name: str) -> str:
    """The address of this host from which a host is reached.

    Raises:
        ConfigurationError: ssh is not installed, or does not know the host, or its name does not resolve.
    """
    try:
        done = subprocess.run([*ssh, "-G", name], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise ConfigurationError(f"{ssh[0]} is not installed; install OpenSSH, or start each host by --nodes") from None
    except subprocess.CalledProcessError as error:
        raise ConfigurationError(f"ssh does not accept the host {name!r}: {error.stderr.strip()}") from None
    settings = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    where = settings.get("hostname", name)
    try:
        family, _, _, _, address = socket.getaddrinfo(where, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # nothing is sent: the system only chooses the route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigurationError(
            f"the host {where!r} cannot be reached from here: {error.strerror}; give --host-address, the address "
            "of this machine that it can connect to"
        ) from None
