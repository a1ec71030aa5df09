"""How soon real runs notice faults and continue, for the table of faults in docs/explanation/failures.md.

    python benchmarks/faults.py            a line for each fault, with the median of three runs

Every fault hits a run of `softmax` on two workers in its middle. Times are seconds between the signal and what follows.
"""

from __future__ import annotations

import dataclasses
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from flockstep.chaos.base import DisruptedRun, Disruption, Expected, Setting
from flockstep.chaos.run import ChaosRun
from flockstep.records.events import Event, PromotedEvent
from flockstep.records.folder import RunFolder
from flockstep.strategies.base import Strategy

RUNS = 3
STEPS = 3000
HEARTBEAT = 2.0


@dataclass(frozen=True)
class Measured(Disruption):
    """Signals a process of the run when each worker has taken a third of its steps, and measures what follows."""

    noun: ClassVar[str] = "disruption"
    who: str = "worker-1"
    kind: signal.Signals = signal.SIGKILL
    until: Callable[[ChaosRun], bool] = lambda run: False
    seconds: list[float] = field(default_factory=list)

    @classmethod
    def drawn(cls, random: object, setting: Setting) -> None:
        """Draw nothing, because a measurement chooses its own disruption."""

    def expected(self, setting: Setting) -> Expected:
        return Expected()

    def act(self, run: DisruptedRun) -> None:
        """Send the signal; measure the seconds until `until` is true."""
        assert isinstance(run, ChaosRun)
        run.wait(lambda: min(map(run.steps, range(run.setting.workers))) >= run.setting.steps // 3)
        pid = run.pid if self.who == "launcher" else run.process_of(self.who)
        assert pid is not None, run.err
        began = time.monotonic()
        run.send(self.kind, pid)
        while not self.until(run) and time.monotonic() < began + 60:
            time.sleep(0.001)
        self.seconds.append(time.monotonic() - began)


def says(text: str) -> Callable[[ChaosRun], bool]:
    """Whether the command has written a text."""
    return lambda run: text in run.err


def ends(run: ChaosRun) -> bool:
    """Whether no process of the run is left."""
    return not run.processes()


def measure(strategy: str, disruption: Measured) -> tuple[list[float], list[Event]]:
    """Disrupt `RUNS` runs; return the seconds, and the events of all runs that have a record."""
    events: list[Event] = []
    for number in range(RUNS):
        setting = Setting("softmax", Strategy.parse(strategy), 2, STEPS, number, HEARTBEAT)
        with tempfile.TemporaryDirectory() as place, ChaosRun(setting, Path(place) / "run", disruption) as run:
            run.begin()
            events += RunFolder(run.folder).read_events() if run.summary is not None else []
    return disruption.seconds, events


def show(what: str, seconds: list[float]) -> None:
    """Print the median and the range of the seconds."""
    print(f"{what}: median {statistics.median(seconds):.3f} s, {min(seconds):.3f} to {max(seconds):.3f} s", flush=True)


def main() -> None:
    """Measure each fault in turn."""
    kill = Measured(until=says("worker 1 was killed by SIGKILL"))
    show("SIGKILL of a worker until the run says so (asgd)", measure("asgd", kill)[0])
    stop = dataclasses.replace(kill, kind=signal.SIGSTOP, until=says("has not answered for 2 s"), seconds=[])
    show("SIGSTOP of a worker until the run says so, heartbeat 2 s (asgd)", measure("asgd", stop)[0])
    server = Measured(who="server-0", until=says("continues in its place"))
    seconds, events = measure("ps(consistency=bsp, replicas=1)", server)
    show("SIGKILL of a server with a backup until the run says so", seconds)
    pushes = [event.push_seconds for event in events if isinstance(event, PromotedEvent)]
    show("  from then until the first push at the backup", [one for one in pushes if one is not None])
    launcher = Measured(who="launcher", until=ends)
    show("SIGKILL of the launcher until no process is left (asgd)", measure("asgd", launcher)[0])
    term = Measured(who="launcher", kind=signal.SIGTERM, until=lambda run: not run.going)
    show("SIGTERM until the command has ended, with a checkpoint (all_reduce)", measure("all_reduce", term)[0])


if __name__ == "__main__":
    main()
