"""Time to a target accuracy while workers of a script are killed and come back, beside torchft and torchrun.

A worker is killed every `--every` seconds, and two thirds of that time later a worker joins. Ways, with one script
(`preemption_script.py`) and synchronous SGD:

    steady      flockstep launch, in which nobody dies
    flockstep   flockstep launch --min-workers 1 --max-workers N: the others take the step again, without new processes;
                `flockstep join` starts a worker
    torchft     torchft 0.2.0 on gloo (pip install torchft==0.2.0) with its lighthouse, as its README starts them, but
                for the time after which a heartbeat is missed, 1 s in place of 5
    torchrun    DistributedDataParallel on gloo under torchrun --max-restarts, which starts all workers again from a
                checkpoint of every tenth step, so that nobody has to join

A step takes at least `--step` seconds, in which the process sleeps as it would for a GPU, because all workers share the
cores of this machine. The clock starts with the first step, and ends at the first evaluation that reaches the target.
The time until the next fault begins when the workers train again after the last one, which favors ways that start
slowly. Worker-seconds are the seconds times the workers that trained. A pause is the longest time between two steps of
a worker that goes on (of all workers where nobody does), less a usual step. Needs Linux.

    python benchmarks/preemption.py [--workers 8] [--every 30] [--step 0.5] [--ways flockstep,torchft] [--seeds 3]
        [--json]

A way that needs more than 10 minutes is given up. A short trial: --workers 2 --every 6 --step 0.05.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.ports import free_port
from support.processes import COMMAND, alive, wait_until

SCRIPT = Path(__file__).with_name("preemption_script.py")
LONGEST = 600.0
"""Seconds after which a way that has not reached the target is given up."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--every", type=float, default=30.0, help="seconds from one death to the next")
    parser.add_argument("--step", type=float, default=0.5, help="shortest time of a step in seconds")
    parser.add_argument("--target", type=float, default=0.95)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--seeds", type=int, default=1, help="runs of each way, each with data in another order")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # ends what was started
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in options.ways.split(",")}
    for seed in range(options.seeds):
        options.seed = seed
        for name, done in runs.items():
            with tempfile.TemporaryDirectory() as folder:
                done.append(Race(WAYS[name](Path(folder), options), options).run())
            print(f"{name}: {json.dumps(done[-1])}", file=sys.stderr, flush=True)
    found = {name: {key: statistics.median(one[key] for one in done) for key in done[0]} for name, done in runs.items()}
    if options.json:
        print(json.dumps({**vars(options), "found": found}))
        return
    print(f"{options.workers} workers, one killed every {options.every:g} s, steps of {options.step:g} s")
    names = list(next(iter(found.values())))
    print("way       " + "".join(f"{name:>16}" for name in names))
    for way, figures in found.items():
        print(f"{way:<10}" + "".join(f"{figures[name]:>16.2f}" for name in names))


class Way:
    """Starts the script's workers, each of which writes its steps to the file `times-PID`."""

    faults = True
    """Whether workers are killed."""
    restarts = False
    """Whether the way starts all workers again after a death, so that nobody has to join."""

    def __init__(self, folder: Path, options: argparse.Namespace):
        self.folder, self.workers = folder, options.workers
        self.words = [str(SCRIPT), str(folder), str(options.target), str(options.step), str(options.seed)]
        self.words.insert(1, type(self).__name__.lower().replace("steady", "flockstep"))
        self.started: list[subprocess.Popen[bytes]] = []

    def begin(self) -> None:
        """Start all workers."""
        raise NotImplementedError

    def join(self) -> None:
        """Let a worker join."""

    def start(self, *words: str, **variables: str) -> None:
        """Start a command in a session of its own."""
        with (self.folder / "log").open("ab") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **variables}
            self.started.append(
                subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True)
            )

    def end(self) -> None:
        """End all processes."""
        pids = [int(file.name.removeprefix("times-")) for file in self.folder.glob("times-*")]
        for one in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGTERM)
        for pid in filter(alive, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for one in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()


class Flockstep(Way):
    """Workers leave and join the run that goes on."""

    def begin(self) -> None:
        more = ["--min-workers", "1", "--max-workers", str(self.workers), "--out", str(self.folder / "run")]
        self.start(*COMMAND, "launch", "-n", str(self.workers), *more, *self.words)

    def join(self) -> None:
        self.start(*COMMAND, "join", str(self.folder / "run"))


class Steady(Flockstep):
    """The same without faults."""

    faults = False


class Torchft(Way):
    """Each worker is a replica group; a lighthouse tells them who lives."""

    def begin(self) -> None:
        port = free_port()
        self.lighthouse = f"http://localhost:{port}"
        given = ["--bind", f"[::]:{port}", "--min_replicas", "1", "--heartbeat_timeout_ms", "1000"]
        self.start(str(Path(sys.executable).with_name("torchft_lighthouse")), *given, "--join_timeout_ms", "10000")
        for number in range(self.workers):
            self._replica(number)

    def join(self) -> None:
        dead = next(number for number, one in enumerate(self.started[1:]) if one.poll() is not None)
        self._replica(dead)
        self.started[1 + dead] = self.started.pop()

    def _replica(self, number: int) -> None:
        given = {"TORCHFT_LIGHTHOUSE": self.lighthouse, "REPLICA": str(number), "REPLICAS": str(self.workers)}
        self.start(sys.executable, *self.words, **given)


class Torchrun(Way):
    """torchrun starts all workers again when one has died."""

    restarts = True

    def begin(self) -> None:
        where = ["--nproc-per-node", str(self.workers), "--max-restarts", "1000", "--standalone"]
        more = {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"
        }  # in the shared store workers would find addresses of dead ones
        torchrun = ["-m", "torch.distributed.run", *where, "--monitor-interval", "0.1"]
        self.start(sys.executable, *torchrun, *self.words, **more)


class Race:
    """One way from its first step to the target, with its faults."""

    def __init__(self, way: Way, options: argparse.Namespace):
        self._way, self._every, self._step = way, options.every, options.step
        self._random = np.random.default_rng(0)
        self._present = options.workers
        self._faults: list[tuple[float, str]] = []

    def run(self) -> dict[str, float]:
        """Seconds and worker-seconds until the target, number of deaths and joins, and pauses in seconds."""
        try:
            self._way.begin()
            wait_until(lambda: self._trains(0.0), LONGEST, "the first step")
            began = since = time.time()
            wait, trains = self._every, True
            while not (self._way.folder / "reached").exists():
                now = time.time()
                if now - began > LONGEST:
                    raise SystemExit(f"the target was not reached in {LONGEST:g} s:\n{self._log()}")
                if not trains:
                    since, trains = now, self._trains(self._faults[-1][0])
                elif self._way.faults and now - since > wait:
                    kills = not self._faults or self._faults[-1][1] == "join"
                    (self._kill if kills else self._join)()
                    wait, trains = self._every * (2 / 3 if kills else 1 / 3), False
                time.sleep(0.02)
            return self._figures(began, time.time())
        finally:
            self._way.end()

    def _log(self) -> str:
        return (self._way.folder / "log").read_text()[-2000:]

    def _times(self) -> dict[int, list[float]]:
        """Process → seconds at which it completed its steps."""
        files = self._way.folder.glob("times-*")
        lines = {int(file.name.removeprefix("times-")): file.read_text().splitlines(keepends=True) for file in files}
        return {pid: [float(line) for line in own if line.endswith("\n")] for pid, own in lines.items()}

    def _trains(self, after: float) -> bool:
        """Whether all workers that there should be have taken a step after the given second."""
        if self._way.started[0].poll() is not None and not (self._way.folder / "reached").exists():
            raise SystemExit(f"the run ended:\n{self._log()}")
        stepping = [pid for pid, own in self._times().items() if own and own[-1] > after and alive(pid)]
        return len(stepping) >= (self._present if self._way.faults else 1)

    def _kill(self) -> None:
        pid = int(self._random.choice(sorted(filter(alive, self._times()))))
        self._faults.append((time.time(), "death"))
        os.kill(pid, signal.SIGKILL)
        self._present -= not self._way.restarts

    def _join(self) -> None:
        self._faults.append((time.time(), "join"))
        self._way.join()
        self._present += not self._way.restarts

    def _figures(self, began: float, ended: float) -> dict[str, float]:
        times = self._times()
        usual = statistics.median(b - a for own in times.values() for a, b in pairwise(own))
        pauses: dict[str, list[float]] = {"death": [0.0], "join": [0.0]}
        for (at, kind), (end, _) in pairwise([*self._faults, (ended, "")]):
            going = [own for own in times.values() if own and own[0] < at < own[-1]]
            everyone = sorted(second for own in times.values() for second in own)
            for own in going or [everyone]:
                gaps = [b - a for a, b in pairwise(own) if b > at and a < end]
                pauses[kind].append(max(gaps, default=0.0) - usual)
        steps = [b - a for own in times.values() for a, b in pairwise(own) if b > began]
        return {
            "seconds": ended - began,
            "worker-seconds": sum(steps),
            "deaths": sum(kind == "death" for _, kind in self._faults),
            "joins": sum(kind == "join" for _, kind in self._faults),
            "pause of death": max(pauses["death"]),
            "pause of join": max(pauses["join"]),
            "usual step": usual,
        }


WAYS: dict[str, Callable[[Path, argparse.Namespace], Way]] = {
    "steady": Steady,
    "flockstep": Flockstep,
    "torchft": Torchft,
    "torchrun": Torchrun,
}


if __name__ == "__main__":
    main()
