"""Time to a target accuracy while workers are killed and come back, against two ways that start everyone again.

A worker is killed every `--every` seconds, and two thirds of that time later a worker joins. All ways train the job
`digits` by synchronous SGD, with the same interval of checkpoints:

    flockstep   flockstep train --min-workers --max-workers: the other workers continue from the newest checkpoint at
                once, with one worker less until another one joins (flockstep join)
    restart     flockstep train without these options: flockstep resume -n starts everyone again with the workers that
                there are, from the newest checkpoint after a death, and from a checkpoint of that time for a joiner
    torchrun    DistributedDataParallel on gloo under torchrun --max-restarts, which starts everyone again with all
                workers, so that nobody has to join

A step takes at least `--step` seconds, in which the process sleeps as it would for a GPU, because all workers share the
cores of this machine. The clock starts with the first step, and ends at the first evaluation that reaches the target.
The time until the next fault begins when the workers train again after the last one, which favors ways that start
slowly: on a busy machine they would otherwise never come to a checkpoint. Needs Linux.

    python benchmarks/preemption.py [--workers 8] [--every 30] [--step 0.5] [--ways flockstep,restart,torchrun] [--json]

A way that needs more than 10 minutes is given up. A short trial: --workers 2 --every 6 --step 0.05.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from flockstep.records.checkpoints import MANIFEST
from flockstep.records.events import EvaluationEvent
from flockstep.records.folder import RunFolder
from support.processes import COMMAND, MEMORY, RealRun, alive, content, status, wait_until

JOB = f"import sys\nsys.path.append({str(Path(__file__).parent)!r})\nfrom preemption_job import paced\n"
SCRIPT = Path(__file__).with_name("preemption_ddp.py")
CHECKPOINTS, EVALUATIONS = 10, 5
"""Steps between two checkpoints, and between two evaluations."""
LONGEST = 600.0
"""Seconds after which a way that has not reached the target is given up."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--every", type=float, default=30.0, help="seconds from one death to the next")
    parser.add_argument("--step", type=float, default=0.5, help="shortest time of a step in seconds")
    parser.add_argument("--target", type=float, default=0.95)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # ends what was started
    found = {}
    for name in options.ways.split(","):
        with tempfile.TemporaryDirectory() as folder:
            found[name] = measured(WAYS[name](Path(folder), options), options.every)
        print(f"{name}: {json.dumps(found[name])}", file=sys.stderr, flush=True)
    ratios = {n: found["flockstep"]["seconds"] / one["seconds"] for n, one in found.items() if "flockstep" in found}
    if options.json:
        print(json.dumps({**vars(options), "found": found, "ratios": ratios}))
        return
    print(f"{options.workers} workers, one killed every {options.every:g} s, steps of {options.step:g} s")
    print("way         seconds to target  deaths  joins  flockstep's time of it")
    for name, one in found.items():
        ratio = f"{ratios[name]:.2f}" if name in ratios else ""
        print(f"{name:<11} {one['seconds']:>17.1f} {one['deaths']:>7} {one['joins']:>6}  {ratio:>22}")


def measured(way: Way, every: float) -> dict[str, float | int]:
    """Seconds until a way reaches the target, and the number of workers that were killed and that joined."""
    deaths = joins = 0
    try:
        way.begin()
        wait_until(way.trains, LONGEST, "the first step")
        began = since = time.monotonic()
        wait, trains = every, True
        while not way.reached():
            now = time.monotonic()
            if now - began > LONGEST:
                raise SystemExit(f"{type(way).__name__} has not reached the target in {LONGEST:g} s")
            if not trains:
                since, trains = now, way.trains()
            elif now - since > wait and deaths == joins:
                deaths, wait, trains = deaths + 1, every * 2 / 3, False
                way.kill()
            elif now - since > wait:
                joins, wait, trains = joins + 1, every / 3, False
                way.join()
            time.sleep(0.05)
        return {"seconds": time.monotonic() - began, "deaths": deaths, "joins": joins}
    finally:
        way.end()


class Way(ABC):
    """A way to train while workers are killed and come back."""

    def __init__(self, folder: Path, options: argparse.Namespace):
        self.folder, self.workers, self.target, self.step = folder, options.workers, options.target, options.step
        self.random = np.random.default_rng(0)

    @abstractmethod
    def begin(self) -> None:
        """Start all workers."""

    @abstractmethod
    def trains(self) -> bool:
        """Whether the workers have taken a step since they were started, or since the last fault."""

    @abstractmethod
    def reached(self) -> bool:
        """Whether an evaluation has reached the target."""

    @abstractmethod
    def kill(self) -> None:
        """Kill a worker."""

    @abstractmethod
    def join(self) -> None:
        """Let a worker join."""

    @abstractmethod
    def end(self) -> None:
        """End all processes."""


class Flockstep(Way):
    """Workers leave and join the run that goes on."""

    options: ClassVar[tuple[str, ...]] = ("--min-workers", "1", "--max-workers", "{workers}")

    def begin(self) -> None:
        self.record = RunFolder(self.folder / "run")
        more = [option.format(workers=self.workers) for option in self.options]
        often = ["--checkpoint-every", str(CHECKPOINTS), "--evaluate-every", str(EVALUATIONS), "--epochs", "1000"]
        job = self.folder / "job.py"
        job.write_text(f"{JOB}\ndef job():\n    return paced({self.step})\n")
        words = ["train", str(job), "-s", "all_reduce", "-n", str(self.workers), *MEMORY, *often, *more]
        self.run = RealRun([*words, "--target", str(self.target)], self.record.path, torch=True, afresh=True)
        self.joining: list[subprocess.Popen[bytes]] = []
        self.present, self.least = self.workers, 1

    def trains(self) -> bool:
        if not self.run.going():
            raise SystemExit(f"the run ended: {self.run.err}")
        steps = self.run.steps(0)
        return steps >= self.least and len(self._workers()) == self.present and self._checkpoint()

    def _checkpoint(self) -> bool:
        """Whether there is a checkpoint to go back to."""
        return any(self.record.path.glob(f"checkpoints/*/{MANIFEST}"))

    def _workers(self) -> list[int]:
        return [pid for name, pid in self.run.working().items() if name.startswith("worker")]

    def reached(self) -> bool:
        with contextlib.suppress(OSError):  # files are joined when workers change
            for event in self.record.read_events():
                if isinstance(event, EvaluationEvent) and event.metric >= self.target:
                    return True
        return False

    def kill(self) -> None:
        pid = int(self.random.choice(self._workers()))
        self.present -= 1
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not alive(pid), LONGEST, "the worker's end")

    def join(self) -> None:
        self.present += 1
        self.joining.append(subprocess.Popen([*COMMAND, "join", str(self.record.path)], stdout=subprocess.DEVNULL))

    def end(self) -> None:
        self.run.close()
        for one in self.joining:
            one.wait()


class Restart(Flockstep):
    """All processes are started again whenever the workers change."""

    options = ()

    def kill(self) -> None:
        super().kill()
        self._resume()

    def join(self) -> None:
        self.present += 1
        os.kill(self.run.main.pid, signal.SIGTERM)  # takes a checkpoint
        self._resume()

    def _resume(self) -> None:
        wait_until(lambda: not self.run.going(), LONGEST, "the end of the run")
        self.run.close()
        self.run = RealRun(["resume", "-n", str(self.present)], self.record.path, torch=True, afresh=True)


class Torchrun(Way):
    """DistributedDataParallel under torchrun, which starts all workers again when one has died."""

    def begin(self) -> None:
        where = ["--nproc-per-node", str(self.workers), "--max-restarts", "1000", "--standalone"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *where]
        more = map(str, (self.folder, CHECKPOINTS, EVALUATIONS, self.target, self.step))
        settings = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        environment = {**os.environ, **settings}  # in the shared store workers would find addresses of dead ones
        command = [*torchrun, "--monitor-interval", "0.1", str(SCRIPT), *more]
        self.killed = -1
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def trains(self) -> bool:
        if self.process.poll() is not None and not self.reached():
            raise SystemExit((self.folder / "log").read_text()[-2000:])
        return self._restarts() > self.killed and len(self._workers()) == self.workers

    def _restarts(self) -> int:
        """Number of restarts before the workers that have taken the last step; -1 if none has taken a step."""
        return int(content(self.folder / "stepped") or -1)

    def _workers(self) -> list[int]:
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
        return sorted(pid for pid in pids if status(pid)[1:2] == [str(self.process.pid)] and alive(pid))

    def reached(self) -> bool:
        return (self.folder / "reached").exists()

    def kill(self) -> None:
        self.killed = self._restarts()
        os.kill(int(self.random.choice(self._workers())), signal.SIGKILL)

    def join(self) -> None:
        """Nothing has to join, because torchrun has started all workers again."""

    def end(self) -> None:
        workers = self._workers()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for pid in filter(alive, workers):  # they have sessions of their own
            os.kill(pid, signal.SIGKILL)


WAYS: dict[str, Callable[[Path, argparse.Namespace], Way]] = {
    "flockstep": Flockstep,
    "restart": Restart,
    "torchrun": Torchrun,
}


if __name__ == "__main__":
    main()
