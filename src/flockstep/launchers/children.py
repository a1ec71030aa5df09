"""The processes of a run: forked nodes and users' scripts."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import _forkserver, ensure_running
from multiprocessing.process import BaseProcess
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import IO, Any, Protocol

from flockstep.errors import ConfigurationError
from flockstep.launchers.output import ERR, OUT, Sink
from flockstep.records.scratch import place_of_sockets
from flockstep.runtime.member import SILENT, of_fork_server
from flockstep.runtime.place import SECRET
from flockstep.runtime.process_group import OPENED, REASON
from flockstep.system import STOPS

PRELOAD = "flockstep.launchers.entry"
"""Module that the fork server imports once, so that each forked node starts within milliseconds."""
KERNELS = "flockstep.launchers.preload"
"""Module that the fork server imports for workers that may compute sums in shared memory."""

DRAIN = 1.0
"""Seconds that the supervisor waits for the last output of ended processes, whose own children may keep the pipes
open.
"""
LONGEST_LINE = 1 << 20
"""Length in bytes from which a line of output is passed on in parts, before the line has ended."""
HOST_LOST = 1 << 16
"""Exit code that stands for a process on a host that was lost; no process ends with this code."""
ENDED = HOST_LOST + 1
"""Exit code that stands for the unknown exit code of a process that another launcher has started."""
UNGUARDED = 83
"""Exit code of a forked process that would start another run while it imports the program that started the run."""
NODE = "flockstep-node"
"""Name of every process that is forked for a run; from this name, the process knows that it belongs to a run before it
imports the user's program.
"""
GUARD = (
    "every process of a run, or of a pool, imports the program that starts the run, and this program starts a run "
    'while it is being imported; put the call under if __name__ == "__main__":'
)


class Child(Protocol):
    """A process that this process has started."""

    pid: int
    reason: str | None
    """Remark of another host about the end of a process of that host; None if the process runs on this host."""

    def exit_code(self) -> int | None:
        """Exit code of the process: None while the process runs; -n if signal n ended the process."""

    def kill(self) -> None:
        """Kill the process at once, even if it is stopped."""


class Forked:
    """A child process forked from the fork server."""

    reason: str | None = None

    def __init__(self, process: BaseProcess):
        self._process = process
        self.pid = process.pid or 0

    def exit_code(self) -> int | None:
        """Exit code of the process: None while the process runs; -n if signal n ended the process."""
        return self._process.exitcode

    def kill(self) -> None:
        """Send SIGKILL to the process."""
        self._process.kill()


def begun(
    command: Sequence[str], environment: dict[str, str], stdin: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Start a command as a process whose output goes to pipes; return the process.

    If a file is given as its standard input, the process runs in a new session, which Ctrl-C does not reach.
    """
    own, pipe = stdin is not None, subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=stdin, stdout=pipe, stderr=pipe, start_new_session=own)


def unbuffered(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment of a process whose output Python must not buffer; a setting of the user is kept.

    Python buffers output to a pipe in blocks of 8 KiB.
    """
    return {"PYTHONUNBUFFERED": "1", **environment}


class Script:
    """A process whose output this process passes on, such as that of a user's script."""

    reason: str | None = None

    def __init__(self, process: subprocess.Popen[bytes] | Forked, outputs: Sequence[IO[bytes] | None], sink: Sink):
        """Pass the output of the process on; `sink` takes it in whole lines.

        `outputs` are the ends for reading of the pipes of standard output and standard error.
        """
        self._process = process
        self.pid = process.pid
        self._relays = [
            threading.Thread(target=relay, args=(source, stream, sink), daemon=True)
            for source, stream in zip(outputs, (OUT, ERR), strict=True)
        ]
        for thread in self._relays:
            thread.start()

    def exit_code(self) -> int | None:
        """Exit code of the process: None while the process runs; -n if signal n ended the process."""
        return self._process.exit_code() if isinstance(self._process, Forked) else self._process.poll()

    def kill(self) -> None:
        """Send SIGKILL to the process."""
        self._process.kill()

    def drain(self, deadline: float) -> None:
        """Wait until the sink has received the script's whole output, but no longer than `deadline` on the monotonic
        clock.
        """
        for thread in self._relays:
            thread.join(max(0.0, deadline - time.monotonic()))


def drain_all(scripts: Sequence[Script]) -> None:
    """Wait until the whole output of ended scripts is passed on, for at most `DRAIN` seconds."""
    deadline = time.monotonic() + DRAIN
    for one in scripts:
        one.drain(deadline)


def relay(source: IO[bytes], stream: int, sink: Sink) -> None:
    """Pass on a process's output in whole lines, so that lines of several processes do not mix."""
    left = bytearray()
    with source:
        while chunk := os.read(source.fileno(), 1 << 16):
            end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
            if not end and len(left) + len(chunk) >= LONGEST_LINE:
                end = len(chunk)
            left += chunk[:end] if end else chunk
            if end:
                sink(stream, bytes(left))
                left = bytearray(chunk[end:])
        if left:
            sink(stream, bytes(left))


@contextmanager
def _fork_server(preload: Sequence[str], environment: Mapping[str, str]) -> Iterator[ForkServerContext]:
    """Context manager with the multiprocessing context of the fork server, in which a first process, or another one
    after the server has ended, starts the server.

    The server imports `preload` and runs with the variables `environment`. Signals that stop a run are blocked in the
    context, and hence in the tracker, the server and its processes.
    """
    context = multiprocessing.get_context("forkserver")
    torch = ["flockstep.frameworks.torch"] if "torch" in sys.modules else []
    context.set_forkserver_preload([PRELOAD, *preload, *torch])
    usual = {name: os.environ.get(name) for name in (SECRET, *environment)}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    os.environ.update(environment)
    os.environ.pop(SECRET, None)  # the fork server, and all that it forks, would have it in their environment
    folder, tempfile.tempdir = tempfile.tempdir, str(place_of_sockets())  # where the server's socket will be
    try:
        resource_tracker.ensure_running()  # starting the tracker unblocks signals
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        yield context
    finally:
        tempfile.tempdir = folder
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for name, value in usual.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def start_fork_server(preload: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start the fork server, which imports `preload` while this process goes on; do nothing if the server runs.

    `environment` holds variables that libraries read when they are imported.
    """
    with _fork_server(preload, environment):
        ensure_running()


def end_fork_server() -> None:
    """End this process's fork server; the next fork starts another one."""
    server: Any = _forkserver  # multiprocessing has no public way
    server._stop()


def _forked(folder: str | None, target: Callable[..., Any], *arguments: object) -> None:
    """Run a function in a process that removes the fork server's folder if it outlives the launcher."""
    of_fork_server[:] = [] if folder is None else [folder]
    target(*arguments)


def fork(target: Callable[..., Any], arguments: Sequence[object], preload: Sequence[str] = ()) -> Forked:
    """Run `target(*arguments)`, whose arguments are plain values, in a forked process. Signals that stop a run are
    blocked there until the process ignores them.

    If the fork server does not run yet, the server imports `preload`, and PyTorch if this process has imported PyTorch.
    """
    with _fork_server(preload, {}) as context:
        ensure_running()  # before the process is made, which then knows the folder of the server's socket
        # A launcher that multiprocessing has started shares the folder with its parent, who still needs it.
        folder = get_temp_dir() if multiprocessing.parent_process() is None else None
        process = context.Process(target=_forked, args=(folder, target, *arguments), name=NODE)
        process.start()
    return Forked(process)


def fork_script(target: Callable[..., Any], arguments: Sequence[object], sink: Sink) -> Script:
    """Run `target(*arguments, out, err)` in a forked process; `sink` receives what it writes to the pipes."""
    sources, there = [], []
    for _ in range(2):
        source, end = os.pipe()
        sources.append(os.fdopen(source, "rb", 0))
        there.append(Connection(end, readable=False))
    try:
        process = fork(target, (*arguments, *there))
    finally:
        for one in there:
            one.close()
    return Script(process, sources, sink)


def end_if_unguarded() -> None:
    """End this process if it was forked for a run and is still importing the program that started the run.

    Then the import has reached an unguarded call that would start another run. The supervisor recognizes the exit code.

    Raises:
        ConfigurationError: this process was not started for a run, but by something else, such as a process pool of the
            program.
    """
    process = multiprocessing.current_process()
    if not getattr(process, "_inheriting", False):  # the attribute by which multiprocessing itself detects this
        return
    if process.name == NODE:
        os._exit(UNGUARDED)
    raise ConfigurationError(GUARD)


def refuse_program() -> None:
    """End this process if it is unguarded (see `end_if_unguarded`), and refuse a program that its processes could not
    import.

    Raises:
        ConfigurationError: the program is not a file, as when Python reads it from standard input, or the program is
            unguarded.
    """
    end_if_unguarded()
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    # A module, run with -m, is imported by its name; without a path, as in a notebook, nothing is imported.
    if path is not None and getattr(main, "__spec__", None) is None and not Path(path).is_file():
        raise ConfigurationError(
            f"the processes of a run import the program that starts the run, which must be a file, got {path}; write "
            "the program into a .py file and run that file, or use python -c or a notebook"
        )


def refuse_program_of(child: Child) -> None:
    """Raise `ConfigurationError` if the exit code of a process says that its program cannot be run: its call is
    unguarded, or it opens a process group of its own.
    """
    if isinstance(child, Forked) and child.exit_code() == UNGUARDED:
        raise ConfigurationError(GUARD)
    if child.exit_code() == OPENED:
        raise ConfigurationError(REASON)


def how_it_ended(code: int) -> str:
    """Return text that says how a process ended, from its exit code: "was killed by SIGKILL" or "exited with code
    1".
    """
    if code == HOST_LOST:
        return "was lost with its host"
    if code == ENDED:
        return "has ended"
    if code == SILENT:
        return (
            "ended, because the process that supervises the run did not answer it within the heartbeat: that process "
            "was stopped, or the machine is too busy; raise --heartbeat"
        )
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def reap(children: Sequence[Child], seconds: float | None, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Wait for the children to exit; after `seconds`, kill those that still run. With None, wait without limit.

    `meanwhile` is called repeatedly, for example to receive the exit codes of processes on other hosts.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    while any(child.exit_code() is None for child in children):
        if deadline is not None and time.monotonic() > deadline:
            kill_all(children)
            deadline += 1.0
        meanwhile()
        time.sleep(0.005)


def kill_all(children: Sequence[Child]) -> None:
    """Kill every process in `children`."""
    for child in children:
        child.kill()
