"""A real run of `flockstep train`, in processes that can be disrupted and resumed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from flockstep.errors import ConfigurationError
from flockstep.records.checkpoints import MANIFEST, folders
from flockstep.records.folder import RunFolder
from flockstep.records.summary import Summary
from flockstep_lab.chaos.base import Disruption, Setting
from flockstep_lab.chaos.failpoint import signalled, write_failpoint

COMMAND = (sys.executable, "-c", "from flockstep.cli import main; main()")
POLL = 0.005
"""Seconds between two checks of a run's progress."""
ENDS = 60.0
"""Seconds that the processes of a run may take to end after its command has ended."""


class ChaosRun:
    """A real run in a folder, which `flockstep resume` may continue.

    The processes of the run are found by their environment variable TMPDIR, whose value no other run has.
    """

    def __init__(self, setting: Setting, place: Path, disruption: Disruption | None = None, patience: float = 600.0):
        """`patience`: seconds after which a command that has not ended counts as hanging."""
        self.setting, self.place, self.folder = setting, place, place / "run"
        self.count = 0
        """Number of signals that a disruption from outside has sent."""
        self.codes: list[int] = []
        """Exit code of each command."""
        self.hangs = False
        self.restarted = False
        """Whether the run began again because it had no complete checkpoint."""
        self.seconds = 0.0
        """Seconds of all commands together."""
        self._disruption, self._patience = disruption, patience
        place.mkdir(parents=True)
        self._scratch = Path(tempfile.mkdtemp(prefix="fs-"))  # short: the path of a socket may not be long
        self._command: subprocess.Popen[bytes]

    def __enter__(self) -> ChaosRun:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill_all()
        shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def pid(self) -> int:
        """Process id of the command that carries out the run."""
        return self._command.pid

    @property
    def going(self) -> bool:
        """Whether the command that carries out the run is still running."""
        return self._command.poll() is None

    @property
    def signalled(self) -> int | None:
        """Process id of the process that sent itself a signal at a failpoint; None if no process has."""
        return signalled(self.place)

    @property
    def summary(self) -> Summary | None:
        """Summary of the run; None if the run has no summary or no configuration."""
        with contextlib.suppress(ConfigurationError):
            return RunFolder(self.folder).read_summary()
        return None

    @property
    def has_checkpoint(self) -> bool:
        """Whether the run has a complete checkpoint."""
        return any((one / MANIFEST).exists() for one in folders(self.folder))

    @property
    def err(self) -> str:
        """What the commands have written to standard error so far."""
        return (self.place / "err").read_text("utf-8", "replace")

    def begin(self) -> None:
        """Start `flockstep train`, and disrupt the run."""
        self._start(self._train_words())
        if self._disruption is not None:
            self._disruption.act(self)
        self._finish()

    def resume(self) -> None:
        """Continue the run from its newest checkpoint. A run without a checkpoint is repeated from the beginning."""
        self.restarted = not self.has_checkpoint
        self._start([*self._train_words(), "--overwrite"] if self.restarted else ["resume", str(self.folder)])
        self._finish()

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` is true, the command has ended, or the command exceeds its time limit."""
        until = time.monotonic() + self._patience
        while self.going and not condition() and time.monotonic() < until:
            time.sleep(POLL)

    def steps(self, rank: int) -> int:
        """Return the number of steps of a worker that are in the record so far."""
        with contextlib.suppress(OSError):
            return (self.folder / "events" / f"worker-{rank}.jsonl").read_bytes().count(b'"type":"step"')
        return 0

    def process_of(self, name: str) -> int | None:
        """Process id of a node such as worker-2; None if the node has no running process."""
        return next((pid for pid in self.processes() if _content(f"/proc/{pid}/comm") == name.encode() + b"\n"), None)

    def processes(self) -> list[int]:
        """Return the process ids of all live processes of the run."""
        mark = f"\0TMPDIR={self._scratch}\0".encode()
        everyone = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
        return [pid for pid in everyone if mark in b"\0" + _content(f"/proc/{pid}/environ") + b"\0" and _alive(pid)]

    def send(self, kind: signal.Signals, pid: int) -> bool:
        """Send a signal to a node; return whether the node's process existed."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, kind)
            return _alive(pid) or kind == signal.SIGKILL
        return False

    def kill_all(self) -> int:
        """Kill all processes of the run; return their number."""
        return sum(self.send(signal.SIGKILL, pid) for pid in self.processes())

    def left(self) -> list[str]:
        """Return what the run has left behind after its end: processes, with their shared memory and open files, and
        sockets.
        """
        until = time.monotonic() + ENDS
        while (found := self.processes()) and time.monotonic() < until:
            time.sleep(POLL)
        processes = [f"process {pid} ({_content(f'/proc/{pid}/comm').decode().strip()})" for pid in found]
        files = [*self._scratch.glob("flockstep-*"), *self._scratch.glob("pymp-*")]
        return processes + [str(file) for file in files if not file.name.startswith("flockstep-kept-")]

    def _train_words(self) -> list[str]:
        setting, disruption = self.setting, self._disruption
        words = ["train", *setting.words, "--out", str(self.folder)]
        words += ["--evaluate-every", str(max(1, setting.steps // 4))]
        if setting.resumes:
            words += ["--checkpoint-every", str(setting.every)]
        if disruption is not None:
            words += disruption.words
            if disruption.failpoint is not None:
                words += ["--import", write_failpoint(self.place, disruption.failpoint)]
        return words

    def _start(self, words: list[str]) -> None:
        environment = {**os.environ, "TMPDIR": str(self._scratch)}
        self._began = time.monotonic()
        with (self.place / "out").open("ab") as out, (self.place / "err").open("ab") as err:
            self._command = subprocess.Popen(
                [*COMMAND, *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment,
                start_new_session=True,
            )

    def _finish(self) -> None:
        self.wait(lambda: False)
        if self.going:
            self.hangs = True
            self.kill_all()
        self.codes.append(self._command.wait())
        self.seconds += time.monotonic() - self._began


def _content(path: str) -> bytes:
    with contextlib.suppress(OSError):
        return Path(path).read_bytes()
    return b""


def _alive(pid: int) -> bool:
    """Whether a process runs, or is stopped; a zombie does not."""
    state = _content(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return bool(state) and state[0] not in (b"Z", b"X")
