"""Processes of a run, however they were started."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

PRELOAD = ["flockstep.launchers.entry"]
"""Imported once by the server that workers are forked from, so that each starts in milliseconds."""


class Child(Protocol):
    """A process that this one started."""

    pid: int

    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""

    def kill(self) -> None:
        """End it now, even if it is stopped."""


class Forked:
    """A child forked from the preloaded server."""

    def __init__(self, process: BaseProcess):
        self._process = process
        self.pid = process.pid or 0

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()


class Script:
    """A child that runs a user's script."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]):
        self._process = subprocess.Popen(command, env=environment)
        self.pid = self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()


def forkserver() -> ForkServerContext:
    """The context whose processes start with the heavy imports done."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def fork(target: Callable[..., Any], arguments: Sequence[object]) -> Forked:
    """Start `target(*arguments)` in a process of its own, deaf to Ctrl-C; arguments are plain values."""
    process = forkserver().Process(target=target, args=tuple(arguments))
    resource_tracker.ensure_running()  # before the next line, since starting it lets Ctrl-C through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited, by the fork server too
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return Forked(process)


def how_it_ended(code: int) -> str:
    """'was killed by SIGKILL' or 'exited with code 1'."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def reap(children: Sequence[Child], seconds: float | None) -> None:
    """Wait for the children to exit, and kill those that have not after that time (None: they have all the time)."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while any(child.exit_code() is None for child in children):
        if deadline is not None and time.monotonic() > deadline:
            kill_all(children)
            deadline += 1.0
        time.sleep(0.005)


def kill_all(children: Sequence[Child]) -> None:
    """End them all now."""
    for child in children:
        child.kill()
