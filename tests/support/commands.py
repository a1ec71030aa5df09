"""Starts commands without the seconds that a new interpreter takes to import them."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

CHANGING = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
"""Variables of the environment that pytest and numerical libraries set while tests run."""


class Process(Protocol):
    """A process, as `subprocess.Popen` describes it."""

    @property
    def pid(self) -> int:
        """Process id."""

    @property
    def returncode(self) -> int | Any:
        """Exit code, as of the last call of `poll` or `wait`."""

    def poll(self) -> int | None:
        """Exit code of the process: None while the process runs, -n if signal n ended the process."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended, and return its exit code."""

    def communicate(self, *, timeout: float | None = None) -> tuple[Any, Any]:
        """Wait until the process has ended, and return its standard output and standard error."""

    def send_signal(self, kind: int) -> None:
        """Send a signal to the process, if it runs."""

    def kill(self) -> None:
        """Send SIGKILL to the process, if it runs."""


class ForkedCommand:
    """A command that a `CommandForker` has forked."""

    def __init__(self, forker: CommandForker, pid: int, scratch: Path):
        self.pid = pid
        self.returncode: int | None = None
        self._forker = forker
        self._scratch = scratch

    def poll(self) -> int | None:
        """Exit code of the process: None while the process runs, -n if signal n ended the process."""
        if self.returncode is None:
            self._forker.read(0.0)
            self.returncode = self._forker.codes.pop(self.pid, None)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended, and return its exit code."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = 1.0 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self._forker.read(left)
        return code

    def communicate(self, *, timeout: float | None = None) -> tuple[str, str]:
        """Wait until the process has ended, and return its standard output and standard error."""
        self.wait(timeout)
        return (self._scratch / "out").read_text(), (self._scratch / "err").read_text()

    def send_signal(self, kind: int) -> None:
        """Send a signal to the process, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, kind)

    def kill(self) -> None:
        """Send SIGKILL to the process, if it runs."""
        self.send_signal(signal.SIGKILL)


class CommandForker:
    """A process that has imported what commands import, and forks a process for each command."""

    def __init__(self, environment: Mapping[str, str], folder: str, modules: Sequence[str] = ()):
        """Start the process.

        Args:
            environment: the variables with which commands are forked; a command with others is not.
            folder: text as long as the path of each command's `scratch`, which takes its place in `/proc/PID/environ`.
            modules: what the process imports for the scripts of its commands.
        """
        self._scripts = bool(modules)
        self.codes: dict[int, int] = {}
        """Exit codes of ended commands that nobody has asked for yet."""
        self._usual = _lasting(environment)
        self._control, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            arguments = ", ".join([str(there.fileno()), *map(repr, modules)])
            program = f"import command_forker; exec(command_forker.program({arguments}))"
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                env={**environment, "TMPDIR": folder},
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    def fork(
        self,
        program: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        scratch: Path,
        first: Path | None = None,
        folder: Path | None = None,
        host: int | None = None,
    ) -> ForkedCommand | None:
        """Start `python -c program *arguments`, with a session of its own.

        Args:
            program: Python code of the command.
            arguments: arguments of the command.
            environment: its variables.
            scratch: folder of the files `out` and `err`, which exist and receive its output; its `TMPDIR`.
            first: first folder on its path; None: there is no other than usual.
            folder: its working folder; None: that of this process.
            host: process in whose namespaces of mounts, network and host name it runs; None: in those of this process.

        Returns:
            The process; None if the command needs an interpreter of its own, because a variable is not as usual.
        """
        if _lasting(os.environ) != self._usual:
            return None
        request = {"program": program, "arguments": arguments, "environment": environment, "host": host}
        forks = self._scripts or arguments[0] in ("train", "resume", "compare")
        request |= {"first": first and str(first), "forks": forks}
        files = {"out": str(scratch / "out"), "err": str(scratch / "err"), "folder": str(folder or Path.cwd())}
        self._control.send(json.dumps({**request, **files}).encode())
        while True:
            if isinstance(pid := self.read(None), int):
                return ForkedCommand(self, pid, scratch)

    def read(self, seconds: float | None) -> int | None:
        """Read what the process reports within some seconds: the id of a new process, or the end of others."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        while poll.poll(None if seconds is None else 1000 * seconds):
            said = [int(word) for word in self._control.recv(100).split()]
            if not said:
                raise RuntimeError(f"the process that forks commands has ended with code {self._process.wait()}")
            if len(said) == 1:
                return said[0]
            self.codes[said[0]], seconds = said[1], 0.0
        return None

    def close(self) -> None:
        """End the process; commands that run go on."""
        self._control.close()
        self._process.wait()


def _lasting(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in CHANGING}
