"""Real runs in processes of their own, and the means to kill, stop and outlive them.

Nothing here sleeps for a fixed time: `wait_until` waits for a condition, with a deadline.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec

import flockstep
from flockstep.records.scratch import sweep
from support.commands import CommandForker, Process

PATIENCE = 150.0
"""Seconds after which what is no promise of ours counts as never happening: a busy machine is no bug."""
PROMISE = 5.0
"""Seconds within which a run ends after a fault, where the machine has nothing else to do."""
COMMAND = [sys.executable, "-c", "from flockstep.cli import main; main()"]
PATIENT = """
import functools
from flockstep.launchers import supervisor
supervisor.WaitMonitor = functools.partial(supervisor.WaitMonitor, period=3600.0)
"""
"""For a command: that it waits, as on a busy machine, is not told."""
SCRIPTS = ("numpy_scripts",)
"""What the process that forks commands imports for scripts without torch and for commands on hosts, from the folder
`children`.
"""
TORCH = ("torch_scripts",)
"""What the process that forks commands imports for scripts and jobs with torch."""
IPC = ("--transport", "ipc")
"""For runs that name no transport: with sums in shared memory their processes would take a second longer to start."""
MEMORY = ("--transport", "shared_memory")
NODE = re.compile("(worker|server)-[0-9]+")
SOURCE = Path(flockstep.__file__).parents[1]
CHILDREN = Path(__file__).parent / "children"
"""Folder of what every process does first; it is the first on the path of all processes that tests start."""


def search_path(*before: Path) -> str:
    """`PYTHONPATH` of a process that a test starts: the given folders, then what every process needs."""
    return os.pathsep.join(map(str, (*before, CHILDREN, SOURCE)))


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait for the condition; fail if it does not come true in time."""
    deadline, pause = time.monotonic() + seconds, 0.005
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(pause)
        pause = min(1.2 * pause, 0.03)  # to look at all processes of a machine takes milliseconds


def content(path: str | Path) -> bytes:
    """A file's bytes; none where it is gone or not ours."""
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def status(pid: int) -> list[str]:
    """Its state (R, S, D, T, Z, …; X for a process that is gone), its parent, and more."""
    return content(f"/proc/{pid}/stat").rpartition(b")")[2].decode().split() or ["X"]


def state(pid: int) -> str:
    """The first of these."""
    return status(pid)[0]


def alive(pid: int) -> bool:
    """Whether the process still runs; a zombie does not."""
    return state(pid) not in "ZX"


def open_files(pid: int) -> set[str]:
    """Names of the files that a process holds open."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(str(link.readlink()))
    return found


@dataclass(frozen=True)
class Ended:
    """How a command ended, and how many seconds after the fault."""

    code: int
    out: str
    err: str
    seconds: float
    limit: float
    """Seconds that this may have taken: as many as four times from the start to the fault where the machine is busy."""
    summary: dict[str, Any] | None


def imports_for(words: Sequence[str], torch: bool) -> tuple[str, ...]:
    """What the process that forks a command imports in addition: kernels for scripts, and for sums in shared memory."""
    return TORCH if torch else SCRIPTS if words[0] == "launch" or MEMORY[1] in words else ()


_forkers: dict[tuple[str, ...], CommandForker] = {}


def forker(modules: tuple[str, ...] = ()) -> CommandForker:
    """The process that forks the commands of this process's tests, after these imports for their scripts."""
    if modules not in _forkers:
        _forkers[modules] = CommandForker(RealRun.usual, tempfile.gettempdir() + "/fs-xxxxxxxx", modules)
    return _forkers[modules]


def end_forkers() -> None:
    """End those processes."""
    while _forkers:
        _forkers.popitem()[1].close()


PROGRESS = re.compile(r"^flockstep: .*; \d+ s so far$")


class RealRun:
    """A `flockstep` command in a session of its own; everything that it starts is known by its TMPDIR."""

    started: ClassVar[list[RealRun]] = []
    usual: ClassVar[dict[str, str]] = {}
    """The environment of all tests, before any test has changed it."""

    def __init__(
        self,
        arguments: Sequence[str],
        record: Path,
        *,
        torch: bool = False,
        within: Sequence[str] = (),
        before: str = "",
        afresh: bool = False,
    ):
        """Without `torch` that package looks as if it were not installed: no process spends time on importing it.

        A real run that names no transport gets `IPC`. `within` is the command that runs it; `before` is Python that
        the command does first. The command, and the scripts of its workers, are forked from a process that has done
        their imports, unless `afresh` asks for interpreters of their own, as do `within` and a changed environment.
        """
        self.record = record
        self.nodes: dict[str, int] = {}
        self.scratch = Path(tempfile.mkdtemp(prefix="fs-"))  # short: a socket's path may not be long
        first = self.scratch / "first"
        first.mkdir()
        if not torch:
            (first / "torch.py").write_text("raise ModuleNotFoundError('absent', name='torch')\n")
        environment = {**os.environ, "TMPDIR": str(self.scratch), "PYTHONPATH": search_path(first)}
        program = f"{PATIENT}\n{before}\n{COMMAND[-1]}"
        transport = IPC if arguments[0] in ("train", "launch", "compare") and "--transport" not in arguments else ()
        where = [str(record)] if arguments[0] == "resume" else ["--out", str(record)]
        words = [arguments[0], *where, *transport, *arguments[1:]]
        with (self.scratch / "out").open("wb") as out, (self.scratch / "err").open("wb") as err:
            forked = None
            if not (within or afresh) and sys.platform == "linux":
                forked = forker(imports_for(words, torch)).fork(program, words, environment, self.scratch, first)
            self.main: Process = forked or subprocess.Popen(
                [*within, *COMMAND[:-1], program, *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment,
                start_new_session=True,
            )
        self._started = self._faulted = time.monotonic()
        RealRun.started.append(self)

    @property
    def err(self) -> str:
        """Standard error so far, without the line that names the folder of the record, and without those on the
        progress of a run that takes longer than ten seconds, as it may on a busy machine.
        """
        lines = (self.scratch / "err").read_text().splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("record: ") and not PROGRESS.search(line))

    def going(self) -> bool:
        """Whether the command still runs."""
        return self.main.poll() is None

    def processes(self) -> set[int]:
        """Every live process of this run, scripts' children included."""
        mark = f"TMPDIR={self.scratch}\0".encode()
        everyone = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
        return {pid for pid in everyone if mark in content(f"/proc/{pid}/environ") + b"\0" and alive(pid)}

    def children(self) -> list[int]:
        """What the command itself has started: scripts, and what forks workers."""
        return sorted(pid for pid in self.processes() if status(pid)[1:2] == [str(self.main.pid)])

    def evaluating(self) -> bool:
        """Whether a process evaluates: it writes what the launcher has to say itself."""
        file = str(self.record.resolve() / "events" / "launcher.jsonl")
        return any(file in open_files(pid) for pid in self.processes())

    def working(self) -> dict[str, int]:
        """Node → its process, which is called like it; what a script starts may have its name, and came later."""
        named = {pid: content(f"/proc/{pid}/comm").decode().strip() for pid in self.processes()}
        return {name: pid for pid, name in sorted(named.items(), reverse=True) if NODE.fullmatch(name)}

    def events(self, node: str) -> bytes:
        """The events that a node has written so far."""
        return content(self.record / "events" / f"{node}.jsonl")

    def steps(self, rank: int) -> int:
        """Number of steps that a worker has written so far."""
        return self.events(f"worker-{rank}").count(b'"type":"step"')

    def wait_for_work(self, steps: int = 50) -> None:
        """Wait until every node takes part and every worker has made so many steps; none of them may have ended."""
        wait_until(lambda: self._at_work(steps) or not self.going(), PATIENCE, f"{steps} steps of everyone")
        assert self.going(), f"the run ended before the fault: {self.err}"
        for node in self.nodes:
            assert b'"type":"node"' not in self.events(node), f"{node} had ended before the fault"

    def _at_work(self, steps: int) -> bool:
        files = self.record.glob("events/*.jsonl")
        names = [file.stem for file in files if not file.stem.startswith(("launcher", "before"))]
        expected = re.search(rb"^workers = ([0-9]+)$", content(self.record / "config.toml"), re.MULTILINE)
        if not expected or any(self.steps(rank) < steps for rank in range(int(expected[1]))):
            return False
        self.nodes = self.working()
        return set(self.nodes) == set(names)

    def fault(self, kind: signal.Signals, whom: str) -> None:
        """Signal 'main', 'group' or a node such as 'worker-1', in the middle of its work; check that it was hit."""
        assert self.going(), f"the run ended before the fault: {self.err}"
        pid = self.nodes.get(whom, self.main.pid)
        assert whom in ("main", "group", *self.nodes)
        assert alive(pid)
        self._faulted = time.monotonic()
        if whom == "group":
            os.killpg(pid, kind)
        else:
            os.kill(pid, kind)
        hit = {signal.SIGKILL: "ZX", signal.SIGSTOP: "T"}.get(kind)
        # A stopped process may have been killed by now, as it should be.
        wait_until(lambda: hit is None or state(pid) in hit + "ZX", PATIENCE, f"{kind.name} of {whom}")

    def end(self, seconds: float = PATIENCE) -> Ended:
        """Wait until the command has ended; no process and no socket of it may be left."""
        wait_until(lambda: not self.going(), seconds, f"the end; so far: {self.err}")
        took, limit = time.monotonic() - self._faulted, max(PROMISE, 4 * (self._faulted - self._started))
        wait_until(lambda: not self.processes(), PATIENCE, f"all processes gone: {sorted(self.processes())}")
        if self.main.returncode == -signal.SIGKILL:
            sweep(self.scratch)  # a script's launcher that is killed leaves its folder, which the next run removes
        left = list(self.scratch.glob("flockstep-*"))
        if self.main.returncode != -signal.SIGKILL:  # a process that is killed leaves multiprocessing's folder
            left += self.scratch.glob("pymp-*")
        left = [folder for folder in left if not folder.name.startswith("flockstep-kept-")]
        assert not left, {
            folder.name: [(file.name, file.lstat().st_size) for file in folder.iterdir()] for folder in left
        }
        file = self.record / "summary.json"
        summary = msgspec.json.decode(file.read_bytes()) if file.exists() else None
        return Ended(self.main.returncode, (self.scratch / "out").read_text(), self.err, took, limit, summary)

    def close(self) -> None:
        """End every process that is left, whatever the test did."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.main.wait(PATIENCE)
        shutil.rmtree(self.scratch, ignore_errors=True)
