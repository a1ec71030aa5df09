"""Processes of a run, however they were started."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import IO, Any, Protocol, TextIO

PRELOAD = ["flockstep.launchers.entry"]
"""Imported once by the server that workers are forked from, so that each starts in milliseconds."""

DRAIN = 1.0
"""Seconds to wait for the last output of processes that have ended: what they started may hold their pipes open."""
LONGEST_LINE = 1 << 20
"""Bytes of a line from which on it is passed on before its end has come."""
_ONE_AT_A_TIME = threading.Lock()


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
    """A child that runs a user's script; what it prints comes out in whole lines."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]):
        self._process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.pid = self._process.pid
        pipes = (self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr)
        self._relays = [threading.Thread(target=relay, args=pair, daemon=True) for pair in pipes]
        for thread in self._relays:
            thread.start()

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()

    def drain(self, deadline: float) -> None:
        """Wait until all that it has printed is out, at the latest until that time of the monotonic clock."""
        for thread in self._relays:
            thread.join(max(0.0, deadline - time.monotonic()))


def relay(source: IO[bytes], sink: TextIO) -> None:
    """Copy whole lines from a process, so that those of several do not run together, to the file behind `sink`."""
    left, out = bytearray(), sink.fileno()
    with source:
        while chunk := os.read(source.fileno(), 1 << 16):
            end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
            if not end and len(left) + len(chunk) >= LONGEST_LINE:
                end = len(chunk)
            left += chunk[:end] if end else chunk
            if end:
                _write(out, left)
                left = bytearray(chunk[end:])
        _write(out, left)


def _write(out: int, data: bytearray) -> None:
    """Write it all; what nobody takes any more is dropped, for a script must not wait for its reader for ever."""
    rest = memoryview(data)
    with _ONE_AT_A_TIME, contextlib.suppress(OSError):
        while rest:
            try:
                rest = rest[os.write(out, rest) :]
            except BlockingIOError:
                select.select([], [out], [])


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
