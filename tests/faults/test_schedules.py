"""A run continues after every kind of stop under every schedule of the learning rate, wherever its workers are.

One run of each strategy and schedule passes through all events that can happen to it, one after the other. The product
strategy × schedule runs under `make test-all`; every module that runs more than ten runs ends with the table of events.
A few runs are made at every push, at least one for each way in which a run continues.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flockstep import registry
from flockstep.cli.app import run as run_command
from flockstep.errors import ConfigurationError, FlockstepError
from flockstep.records import checkpoints as disk
from flockstep.records.folder import RunFolder
from flockstep.runtime.resizing import require_script_resizable
from flockstep.strategies.base import Strategy
from support.jobs import go_on, paced_train
from support.matrix import few
from support.processes import PATIENCE, Ended, RealRun, content, wait_until
from support.torch_scripts import SCHEDULES, end_scheduled_script, write_scheduled_script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes by their names in /proc")

STEPS = {"script": 10_000, "job": 1500}
"""Steps of a run: scripts end when all events have happened, jobs take the rest without a pause."""
WORK = 25
"""Steps that every worker takes after an event, so that the schedule has changed and there is a checkpoint."""
EVENTS = ("server killed", "leave", "join", "worker killed", "killed after a loss", "all killed")
"""The events in the order in which they happen to one run of three workers."""
CHANGES = EVENTS[1:5]
JOB_SCHEDULES = dict(zip(SCHEDULES, ("constant", "cosine", "step_decay", "linear_warmup"), strict=True))
"""The schedules of jobs that change as those of scripts do."""
Chain = tuple[str, str, str]
_table: dict[Chain, dict[str, str]] = {}


def _strategies() -> list[str]:
    rules = [f"ps({name})" for name in registry.names("consistency") if name != "bsp"]
    return [*registry.names("strategy"), "ps(ssp(3))", *rules]


def possible(kind: str, strategy: str, event: str) -> bool:
    """Whether the event can happen to a run with this strategy, and the run has checkpoints."""
    found = Strategy.parse(strategy)
    traits, changes = found.traits, event in CHANGES
    if not (traits.restarts and traits.checkpoints) or (kind == "script" and traits.needs_job):
        return False
    if event == "server killed" and not found.servers_for(2):
        return False
    if event == "killed after a loss" and not traits.survives:
        return False
    try:
        for workers in (2, 3) if changes else (2,):
            found.check(workers)
        if changes:
            require_script_resizable(found)
    except FlockstepError:
        return False
    return True


def events(kind: str, strategy: str) -> list[str]:
    """The events that can happen to a run with this strategy, in their order."""
    return [event for event in EVENTS if possible(kind, strategy, event)]


CHAINS: list[Chain] = [
    (kind, strategy, schedule)
    for schedule, kind, strategy in itertools.product(SCHEDULES, ("script", "job"), _strategies())
    if events(kind, strategy)
]


@pytest.fixture(scope="module", autouse=True)
def table(request: pytest.FixtureRequest) -> Iterator[None]:
    """Prints what became of the runs: a row for each strategy and schedule, a column for each event."""
    _table.clear()
    yield
    if len(_table) <= 10:
        return
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        for head, cells in [(("run", "strategy", "schedule"), dict(zip(EVENTS, EVENTS, strict=True))), *_table.items()]:
            row = ["{:6} {:21} {:9}".format(*head), *(f"{cells.get(event, '–'):19}" for event in EVENTS)]
            sys.stdout.write("\n" + "  ".join(row).rstrip())
        sys.stdout.write("\n")


class Passage:
    """A run that passes through events; `happen` returns once the run has gone on after an event."""

    def __init__(self, kind: str, strategy: str, schedule: str, folder: Path, workers: int):
        self._script, self._folder, steps = kind == "script", folder, STEPS[kind]
        if self._script:
            words, program = ["launch", "-n", str(workers)], [write_scheduled_script(folder), strategy, schedule]
            program.append(str(steps))
        else:
            words, program = paced_train(folder, strategy, workers, steps), []
            # with the job's own rate of 1, mpca diverges without any event where a round of averaging lasts many steps
            words += ["--schedule", JOB_SCHEDULES[schedule], "--lr", "0.1"]
        bounds = ["--min-workers", "1", "--max-workers", "3"] if workers == 3 else []
        words += ["--checkpoint-every", "10", *bounds, *program]
        self.run = RealRun(words, folder / "run", torch=self._script)
        self._work()

    def happen(self, event: str) -> None:
        """Let the event happen, and wait until the run has gone on from it."""
        match event:
            case "join":
                assert run_command(["join", str(self.run.record)]) == 0
                self._goes_on_with(3)
            case "leave":
                self.run.fault(signal.SIGTERM, "worker-1")
                self._goes_on_with(2)
            case "server killed":
                before = self._segments()
                self.run.fault(signal.SIGKILL, "server-0")
                self._wait(lambda: self._segments() > before, "the run continues with new servers")
                self._work()
            case "worker killed":
                before = self.run.steps(0)
                self.run.fault(signal.SIGKILL, "worker-1")
                self._wait(lambda: self._workers() == 2 or self.run.steps(0) > before + WORK, "the others go on")
                if self._workers() == 2:
                    self._work()
            case "killed after a loss":
                self._wait(self._saved_without_the_lost, "a checkpoint of the workers that live")
                assert set(disk.newest(self.run.record).manifest.steps) == {0, 2}
                self._resume()
            case "all killed":
                self._resume()

    def end(self) -> Ended:
        """Let the run take its last steps."""
        (end_scheduled_script if self._script else go_on)(self._folder)
        return self.run.end()

    def _resume(self) -> None:
        self.run.fault(signal.SIGKILL, "main")
        assert self.run.end().code != 0
        self.run = RealRun(["resume"], self.run.record, torch=self._script)
        self._goes_on_with(2)

    def _goes_on_with(self, workers: int) -> None:
        self._wait(lambda: self._workers() == workers, f"the run continues with {workers} workers")
        self._work()

    def _work(self) -> None:
        """Wait until all workers have taken steps since the run last continued, and a checkpoint is complete."""
        self.run.wait_for_work(WORK)
        self._wait(self._saved, "a checkpoint")

    def _saved(self) -> bool:
        with contextlib.suppress(ConfigurationError):  # none yet
            return bool(disk.newest(self.run.record))
        return False

    def _saved_without_the_lost(self) -> bool:
        return self._saved() and bool(disk.newest(self.run.record).manifest.lost)

    def _workers(self) -> int:
        found = re.search(rb"^workers = ([0-9]+)$", content(self.run.record / "config.toml"), re.MULTILINE)
        return int(found[1]) if found else 0

    def _segments(self) -> int:
        """Number of times the run has continued, by its record."""
        return self.run.events("before").count(b"continued from step") + self.run.events("launcher").count(
            b"continued from step"
        )

    def _wait(self, condition: object, what: str) -> None:
        assert callable(condition)
        wait_until(lambda: condition() or not self.run.going(), PATIENCE, what)
        assert self.run.going(), f"the run ended before: {what}; {self.run.err}"


@pytest.mark.parametrize(
    ("kind", "strategy", "schedule"),
    few(
        CHAINS,
        ("script", "ps(backup)", "step"),
        ("script", "overlap_local_sgd", "warm-up"),
        ("job", "ps(essp)", "epoch"),
    ),
)
def test_a_run_continues_after_every_event(kind: str, strategy: str, schedule: str, tmp_path: Path) -> None:
    """A script checks at every step that its learning rate is that of its step."""
    here = events(kind, strategy)
    cells = _table[kind, strategy, schedule] = dict.fromkeys(here, "not reached")
    passage = Passage(kind, strategy, schedule, tmp_path, 3 if set(here) & set(CHANGES) else 2)
    for event in here:
        cells[event] = "failed"
        passage.happen(event)
        cells[event] = "continues"
    last = here[-1]
    cells[last] = "failed"
    ended = passage.end()
    assert ended.code == 0, ended.err
    summary = RunFolder(passage.run.record).read_summary()
    assert summary.status == "finished"
    cells[last] = "continues"
    for event, change in {"leave": "left after SIGTERM", "join": "1 worker joined"}.items():
        if event in here:
            cells[event] = "failed"
            (note,) = (note for note in summary.notes if change in note and "continued " in note)
            (repeated,) = re.findall("; ([0-9]+) recorded steps were repeated", note) or ["0"]
            # a gradient that is canceled as the program goes on from the copy of its state is recorded as a step
            canceled = 3 if Strategy.parse(strategy).traits.delivery == "partial" else 0
            assert int(repeated) <= canceled
            cells[event] = "continues"
