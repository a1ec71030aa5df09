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

from flockstep.errors import ConfigurationError
from flockstep.launchers.scratch import house_fork_server

PRELOAD = ["flockstep.launchers.preload"]
"""Imported once by the server that nodes are forked from, so that each starts in milliseconds."""

DRAIN = 1.0
"""Seconds to wait for the last output of processes that have ended: what they started may hold their pipes open."""
LONGEST_LINE = 1 << 20
"""Bytes of a line from which on it is passed on before its end has come."""
LAST_WORDS = 4000
"""Bytes of standard error that are kept of a script whose output is not shown."""
UNGUARDED = 83
"""Exit code of a process that starts a run while it imports the program that started the process."""
NODE = "flockstep-node"
"""What a process that is forked for a run is called: it hears that before it imports the program."""
_GUARD = (
    "every process of a run, or of a pool, imports the program that starts it, and this program starts a run while it "
    'is imported; put the call under if __name__ == "__main__":'
)
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
    """A child that runs a user's script; what it prints comes out in whole lines, each after `prefix`."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], prefix: str = "", muted: bool = False):
        """What a `muted` script prints is dropped, but for the end of its standard error if it fails."""
        # A pipe would make Python hold output back until 8 KiB have come together.
        environment = {"PYTHONUNBUFFERED": "1", **environment}
        self._process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.pid = self._process.pid
        self._unsaid = bytearray()
        self._prefix = prefix.encode()
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        out, err = self._process.stdout, self._process.stderr
        self._relays = [
            threading.Thread(target=forget, args=(source, last), daemon=True)
            if muted
            else threading.Thread(target=relay, args=(source, sink, self._prefix), daemon=True)
            for source, sink, last in ((out, sys.stdout, bytearray()), (err, sys.stderr, self._unsaid))
        ]
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
        if self._unsaid and self.exit_code():
            _write(sys.stderr.fileno(), marked(self._unsaid, self._prefix))


def drain_all(scripts: Sequence[Script]) -> None:
    """Wait until all that scripts which have ended have printed is out, for `DRAIN` seconds at the most."""
    deadline = time.monotonic() + DRAIN
    for one in scripts:
        one.drain(deadline)


def forget(source: IO[bytes], last: bytearray) -> None:
    """Read what a process prints, so that it need not wait; keep the last of it."""
    with source:
        while chunk := os.read(source.fileno(), 1 << 16):
            last += chunk
            del last[:-LAST_WORDS]


def marked(lines: bytearray, prefix: bytes, begun: bool = False) -> bytearray:
    """The lines, each after `prefix`; the first goes on with a line that has `begun` before."""
    if not prefix:
        return lines
    whole = lines.splitlines(keepends=True)
    return bytearray(b"".join((b"" if begun and not i else prefix) + line for i, line in enumerate(whole)))


def relay(source: IO[bytes], sink: TextIO, prefix: bytes = b"") -> None:
    """Copy whole lines from a process, so that those of several do not run together, to the file behind `sink`."""
    left, out, begun, returned = bytearray(), sink.fileno(), False, False
    with source:
        while chunk := os.read(source.fileno(), 1 << 16):
            end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
            if not end and len(left) + len(chunk) >= LONGEST_LINE:
                end = len(chunk)
            left += chunk[:end] if end else chunk
            if end:
                _write(out, marked(left, prefix, begun or (returned and left.startswith(b"\n"))))
                begun, returned = not left.endswith((b"\n", b"\r")), left.endswith(b"\r")
                left = bytearray(chunk[end:])
        _write(out, marked(left, prefix, begun))


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
    """The context whose processes start with the heavy imports done: PyTorch only if the job has needed it here."""
    house_fork_server()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *(["flockstep.frameworks.torch"] if "torch" in sys.modules else [])])
    return context


def fork(target: Callable[..., Any], arguments: Sequence[object]) -> Forked:
    """Start `target(*arguments)` in a process of its own, deaf to Ctrl-C; arguments are plain values."""
    process = forkserver().Process(target=target, args=tuple(arguments), name=NODE)
    resource_tracker.ensure_running()  # before the next line, since starting it lets Ctrl-C through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited, by the fork server too
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return Forked(process)


def end_if_unguarded() -> None:
    """End this process at once if it was forked for a run and is still importing the program that started the run.

    The import has come to an unguarded call that would start another run. The supervisor knows the exit code.

    Raises:
        ConfigurationError: something else has started this process, such as a pool of the program's own.
    """
    process = multiprocessing.current_process()
    if not getattr(process, "_inheriting", False):  # as multiprocessing itself finds out
        return
    if process.name == NODE:
        os._exit(UNGUARDED)
    raise ConfigurationError(_GUARD)


def refuse_unguarded(child: Child) -> None:
    """Raise `ConfigurationError` if a forked process has ended because the program's call is unguarded."""
    if isinstance(child, Forked) and child.exit_code() == UNGUARDED:
        raise ConfigurationError(_GUARD)


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
