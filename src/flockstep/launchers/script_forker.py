"""Forks the workers of a script on this host from one process that has already imported what the script imports
first.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from flockstep.launchers.top_imports import top_imports

FOLDER = Path(__file__).parent / "script_preload"
"""Folder of the `sitecustomize` module that Python imports in place of the usual one in the process that forks
scripts.
"""
PIPES = "FLOCKSTEP_PRELOAD"
"""Environment variable with the file descriptors of the pipes: one to read requests from, one to write reports to."""
READY = 60.0
"""Maximum number of seconds that the imports may take; after that, scripts are started in fresh interpreters."""


class ForkedScript:
    """A script's process, forked by a `ScriptForker`."""

    def __init__(self, forker: ScriptForker, pid: int, out: int, err: int):
        self.pid = pid
        self.stdout: IO[bytes] = os.fdopen(out, "rb", 0)
        self.stderr: IO[bytes] = os.fdopen(err, "rb", 0)
        self._forker = forker
        self._handle = os.pidfd_open(pid)  # the process id stays its own until the last worker has been forked

    def poll(self) -> int | None:
        """Exit code of the process: None while the process runs, -n if signal n ended the process."""
        code = self._forker.exit_code(self.pid)
        if code is not None and self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        return code

    def kill(self) -> None:
        """Send SIGKILL to the process."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)


class ScriptForker:
    """A process that imports what a script imports first, and then forks the script's workers.

    For a script, a forked worker does not differ from a worker in a fresh interpreter. If it would differ, `fork`
    returns None.
    """

    def __init__(self, script: Path, command: Sequence[str], environment: Mapping[str, str], workers: int):
        """Start the process, unless the script imports nothing that is worth it.

        Args:
            script: path of the script.
            command: command that starts the script.
            environment: variables that are equal for all workers of this host.
            workers: number of workers on this host.
        """
        self._process: subprocess.Popen[bytes] | None = None
        self._codes: dict[int, int] = {}
        self._said = b""
        self._ready = self._over = False
        self._left: list[tuple[int, int, int, int]] = []
        """Pipes of the workers not yet forked: ends for reading, here, and ends for writing, in the process."""
        path = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
        imports = top_imports(script, path) if workers > 1 and sys.platform == "linux" else []
        if imports:
            self._start([str(script.resolve().parent)], imports, command, environment, workers)

    def _start(
        self,
        folder: Sequence[str],
        imports: Sequence[str],
        command: Sequence[str],
        environment: Mapping[str, str],
        workers: int,
    ) -> None:
        pairs = [(*os.pipe(), *os.pipe()) for _ in range(workers)]
        self._left = [(out, err, out_there, err_there) for out, out_there, err, err_there in pairs]
        there = [end for pipes in self._left for end in pipes[2:]]
        source, self._requests = os.pipe()
        self._reports, report = os.pipe()
        os.set_blocking(self._reports, False)
        path = os.pathsep.join(filter(None, [str(FOLDER), environment.get("PYTHONPATH")]))
        ends = [*there, source, report]
        try:
            self._process = subprocess.Popen(
                command,
                env={**environment, "PYTHONPATH": path, PIPES: f"{source} {report}"},
                pass_fds=ends,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        finally:
            for end in ends:
                os.close(end)
        self._ask([*folder, str(len(there)), *map(str, there), *imports])

    def fork(self, environment: Mapping[str, str], secret: str) -> ForkedScript | None:
        """Start the script of one worker with the given environment variables and the secret of the run.

        Returns:
            The process; None if the script must be started in a fresh interpreter.
        """
        if not self._left or not self._is_ready():
            return None
        out, err, *there = self._left[-1]
        self._ask([*map(str, there), secret, *(f"{name}={value}" for name, value in environment.items())])
        word, _, pid = self._line(READY).partition(" ")
        if word == "failed":
            self._abandon()
            return None
        if word != "pid":
            self.close()
            return None
        self._left.pop()
        script = ForkedScript(self, int(pid), out, err)
        if not self._left:
            os.close(self._requests)
        return script

    def _abandon(self) -> None:
        """Fork no more workers; the process lasts as long as the workers that it has forked."""
        os.close(self._requests)
        for end in (end for pipes in self._left for end in pipes[:2]):
            os.close(end)
        self._left = []

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of a forked process; None while it runs. If the process that forks ends, all forked
        processes end, too.
        """
        while pid not in self._codes and (line := self._line(0.0)):
            _, ended, code = line.split()
            self._codes[int(ended)] = int(code)
        return self._codes.get(pid, -signal.SIGKILL if self._over else None)

    def close(self) -> None:
        """End the forking process, and the forked processes that still run."""
        if self._process is None:
            return
        process, self._process = self._process, None
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()
        self._read_last()
        if self._left:
            self._abandon()

    def _read_last(self) -> None:
        """Read the last reports of the process, which has ended, and close their pipe."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._reports, 1 << 16):
                self._said += data
        os.close(self._reports)
        self._over = True

    def _is_ready(self) -> bool:
        """Whether the imports are done, and have written nothing that each worker would have to write."""
        if not self._ready:
            assert self._process is not None
            said = self._line(READY, [self._process.stdout, self._process.stderr])
            self._ready = said == "ready"
            if not self._ready:
                self.close()
        return self._ready

    def _ask(self, fields: Iterable[str]) -> None:
        data = b"".join(os.fsencode(field) + b"\0" for field in fields)
        rest = memoryview(b"%08d" % len(data) + data)
        with contextlib.suppress(BrokenPipeError):  # the answer says that the process has ended
            while rest:
                rest = rest[os.write(self._requests, rest) :]

    def _line(self, seconds: float, silent: Sequence[IO[bytes] | None] = ()) -> str:
        """The next report; empty if there is none in time, if the process has ended, or if `silent` files have data."""
        poll = select.poll()
        for one in (self._reports, *(file.fileno() for file in silent if file is not None)):
            poll.register(one, select.POLLIN)
        until = time.monotonic() + seconds
        while b"\n" not in self._said and not self._over:
            ready = {file for file, _ in poll.poll(max(0.0, until - time.monotonic()) * 1000)}
            if ready != {self._reports}:
                return ""
            data = os.read(self._reports, 1 << 16)
            self._over = not data
            self._said += data
        if silent and {file for file, _ in poll.poll(0)} - {self._reports}:
            return ""
        line, _, self._said = self._said.partition(b"\n")
        return line.decode()
