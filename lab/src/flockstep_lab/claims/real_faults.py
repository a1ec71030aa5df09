"""Injects faults into real processes: kills a worker, or narrows a link between network namespaces."""

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from flockstep.errors import RunError
from flockstep_lab import failures
from flockstep_lab.claims.delay_share import ThroughputLoss

WORKERS, VICTIM = 3, 1
STEPS = 6000
"""Number of steps of the runs in which a worker is killed; large enough that the worker is killed long before
the end.
"""
PATIENCE = 60.0
"""Seconds to wait for a condition before giving up."""
FULL, NARROW = "50mbit", "5mbit"
LONG = 4000
"""Number of steps of the run in which a link becomes narrow; the run is ended long before its last step."""
HELD_BACK = 8
"""Largest number of a worker's latest steps that may be missing from the record, because steps are written with a
delay.
"""
_LINK = re.compile(r"\b(fs[0-9]+)c([0-9]+)@")
_TIME = re.compile(rb'"type":"step","seconds":([0-9.e+-]+)')


@dataclass(frozen=True)
class TrainProcess:
    """A `flockstep train` command that runs as a child process, into which faults are injected."""

    process: subprocess.Popen[str]
    folder: Path

    def times(self, rank: int) -> list[float]:
        """Return the seconds at which a worker finished its gradients, as far as they are in the record."""
        try:
            text = (self.folder / "events" / f"worker-{rank}.jsonl").read_bytes()
        except FileNotFoundError:
            return []
        return [float(t) for t in _TIME.findall(text)]

    def wait_for(self, steps: int) -> None:
        """Wait until every worker has taken `steps` steps.

        Raises:
            RunError: the run ended first, or the wait timed out.
        """
        wait(lambda: self.ended or min(len(self.times(r)) for r in range(WORKERS)) >= steps, f"{steps} steps")
        if self.ended:
            raise RunError(f"the run ended before the fault was injected: {self.process.communicate()[1]}")

    def gained(self, steps: int) -> int:
        """Wait until the affected worker has taken `steps` more steps; return the number of steps that it had taken
        before.

        Raises:
            RunError: the run ended first, or the wait timed out.
        """
        made = len(self.times(VICTIM))
        wait(lambda: self.ended or len(self.times(VICTIM)) >= made + steps, f"{steps} steps of worker {VICTIM}")
        if self.ended:
            raise RunError(f"the run ended before the fault was injected: {self.process.communicate()[1]}")
        return made

    @property
    def ended(self) -> bool:
        """Whether the `flockstep train` command has ended."""
        return self.process.poll() is not None

    def pid(self, rank: int) -> int:
        """Return the process id of a worker, found by its process name among the descendants of the command."""
        for process in Path("/proc").iterdir():
            if process.name.isdecimal():
                with contextlib.suppress(OSError):
                    named = (process / "comm").read_text().strip() == f"worker-{rank}"
                    if named and _parent(_parent(int(process.name))) == self.process.pid:
                        return int(process.name)
        raise RunError(f"no running process is worker {rank}; the run may have ended before the fault was injected")


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def wait(condition: Callable[[], bool], what: str) -> None:
    """Wait until `condition` is true.

    Raises:
        RunError: the condition was not true within `PATIENCE` seconds.
    """
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise RunError(f"gave up waiting for {what} after {PATIENCE:.0f} s")
        time.sleep(0.01)


@contextlib.contextmanager
def running(job: str, strategy: str, steps: int, *options: str) -> Iterator[TrainProcess]:
    """Context manager that runs `flockstep train`, and ends all of its processes on exit."""
    with tempfile.TemporaryDirectory(prefix="fs-") as scratch:
        folder = Path(scratch) / "run"
        command = [sys.executable, "-m", "flockstep", "train", job, "-s", strategy, "-n", str(WORKERS)]
        command += ["--steps", str(steps), "--out", str(folder), *options]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            yield TrainProcess(process, folder)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


def killed(strategy: str) -> str:
    """Kill a worker with SIGKILL, and return how the run ends: an outcome of `failures`, or a description."""
    with running("softmax", strategy, STEPS) as run:
        run.wait_for(50)
        os.kill(run.pid(VICTIM), signal.SIGKILL)
        wait(lambda: run.ended, "the end of the run")
        said = run.process.communicate()[1].strip()
        summary = msgspec.json.decode((run.folder / "summary.json").read_bytes())
        steps = {worker["rank"]: worker["steps"] for worker in summary["per_worker"]}
    if [lost["node"] for lost in summary["lost"]] != [VICTIM]:
        return f"lost {summary['lost']}"
    others = [steps[rank] for rank in range(WORKERS) if rank != VICTIM]
    if run.process.returncode == 0 and set(others) == {STEPS} and steps[VICTIM] < STEPS:
        return failures.GOES_ON
    if run.process.returncode == 1 and f"worker {VICTIM} was killed by SIGKILL" in said and max(others) < STEPS:
        return failures.ENDS
    return f"exit code {run.process.returncode}, steps {steps}, {said!r}"


def why_not() -> str:
    """Return the reason why this machine cannot narrow a real link; empty if it can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid():
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc", "nsenter") if shutil.which(name) is None]
    return f"the commands {', '.join(missing)} are missing" if missing else ""


def narrowed(strategy: str) -> ThroughputLoss:
    """Return the relative losses of throughput of one worker and of all workers when the worker's link becomes ten
    times slower.
    """
    with running("digits", strategy, LONG, "--transport", f"namespaces('{FULL}')") as run:
        run.wait_for(HELD_BACK)
        before = watched(run, 4 * HELD_BACK)
        squeeze(run.pid(VICTIM))
        run.gained(HELD_BACK)
        during = watched(run, HELD_BACK)
    return ThroughputLoss(float(1 - during[VICTIM] / before[VICTIM]), float(1 - during.sum() / before.sum()))


def watched(run: TrainProcess, steps: int) -> npt.NDArray[np.float64]:
    """Return the steps per second of every worker, measured until the affected worker has taken `steps` more steps."""
    made = run.gained(steps)
    own = run.times(VICTIM)[made:]
    between = [[t for t in run.times(rank) if own[0] <= t <= own[-1]] for rank in range(WORKERS)]
    return np.array([(len(times) - 1) / max(times[-1] - times[0], 1e-9) for times in between])


def squeeze(pid: int) -> None:
    """Reduce the bandwidth of a process's network link to a tenth in both directions."""
    inside = ["nsenter", f"--net=/proc/{pid}/ns/net"]
    found = _LINK.search(_said([*inside, "ip", "-o", "link"]))
    if found is None:
        raise RunError(
            f"process {pid} has no network namespace of its own; train with --transport \"namespaces('1gbit')\""
        )
    label, number = found.groups()
    for where, device in ((inside, f"{label}c{number}"), ([], f"{label}h{number}")):
        limit = ["rate", NARROW, "burst", "3200", "latency", "500ms"]
        _said([*where, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *limit])


def _said(command: list[str]) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
