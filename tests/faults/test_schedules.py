"""A run continues after every kind of stop under every schedule of the learning rate, wherever its workers are.

The product strategy × schedule × event runs under `make test-all`; every module that runs more than ten cells ends with
its table. A few cells run at every push, at least one for each way in which a run continues.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flockstep import registry
from flockstep.cli.app import run as run_command
from flockstep.drivers.script_resizing import require_script_resizable
from flockstep.errors import ConfigurationError, FlockstepError
from flockstep.records import checkpoints as disk
from flockstep.records.folder import RunFolder
from flockstep.strategies.base import Strategy
from flockstep_lab.chaos.base import Failpoint
from flockstep_lab.chaos.failpoint import signalled, write_failpoint
from support.jobs import go_on, paced_train
from support.matrix import few
from support.processes import PATIENCE, RealRun, wait_until
from support.torch_scripts import SCHEDULES, write_scheduled_script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes by their names in /proc")

STEPS = 240
EVERY = ["--checkpoint-every", "30"]
Cell = tuple[str, str, str, str]
EVENTS = {
    "all killed": Failpoint("launcher", "checkpoint.complete", 2),
    "server killed": Failpoint("server-0", "state.before_copy", 2),
    "worker killed": Failpoint("worker-1", "gradient.computed", 50),
    "leave": Failpoint("worker-1", "gradient.computed", 50, signal.SIGTERM),
    "join": None,
    "killed after a loss": None,
}
JOB_SCHEDULES = dict(zip(SCHEDULES, ("constant", "cosine", "step_decay", "linear_warmup"), strict=True))
"""The schedules of jobs that change as those of scripts do."""
_table: dict[Cell, str] = {}


def _strategies() -> list[str]:
    rules = [f"ps({name})" for name in registry.names("consistency") if name != "bsp"]
    return [*registry.names("strategy"), "ps(ssp(3))", *rules]


def possible(kind: str, strategy: str, event: str) -> bool:
    """Whether the event can happen to a run with this strategy, and the run has checkpoints."""
    found = Strategy.parse(strategy)
    traits, changes = found.traits, event in ("worker killed", "leave", "join", "killed after a loss")
    if not (traits.restarts and traits.checkpoints) or (kind == "script" and traits.needs_job):
        return False
    if event == "server killed" and not found.servers_for(2):
        return False
    if event == "killed after a loss" and (not traits.survives or "essp" in strategy):
        return False
    try:
        for workers in (2, 3) if changes else (2,):
            found.check(workers)
        if changes:
            require_script_resizable(found)
    except FlockstepError:
        return False
    return True


CELLS = [
    (kind, strategy, schedule, event)
    for kind, strategy, schedule, event in itertools.product(("script", "job"), _strategies(), SCHEDULES, EVENTS)
    if possible(kind, strategy, event)
]


@pytest.fixture(scope="module", autouse=True)
def table(request: pytest.FixtureRequest) -> Iterator[None]:
    """Prints what became of the cells that have run: a row for each strategy and schedule, a column for each event."""
    _table.clear()
    yield
    rows = dict.fromkeys(cell[:3] for cell in _table)
    if len(_table) <= 10:
        return
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        sys.stdout.write("\n" + "  ".join([f"{'run':6} {'strategy':21} {'schedule':9}", *map("{:13}".format, EVENTS)]))
        for kind, strategy, schedule in rows:
            cells = (_table.get((kind, strategy, schedule, event), "–") for event in EVENTS)
            line = "  ".join([f"{kind:6} {strategy:21} {schedule:9}", *map("{:13}".format, cells)])
            sys.stdout.write(f"\n{line.rstrip()}")
        sys.stdout.write("\n")


def kill_after_loss(run: RealRun) -> None:
    """Kill a worker without which the others go on, and all of them once they have written a checkpoint."""
    run.wait_for_work(40)
    run.fault(signal.SIGKILL, "worker-1")

    def written() -> bool:
        with contextlib.suppress(ConfigurationError):  # none yet
            return bool(disk.newest(run.record).manifest.lost)
        return False

    wait_until(lambda: written() or not run.going(), PATIENCE, "a checkpoint of the workers that live")
    steps = disk.newest(run.record).manifest.steps
    assert set(steps) == {0, 2}
    run.fault(signal.SIGKILL, "main")


CHOSEN: list[Cell] = [
    ("script", "ps(ssp(3))", "step", "all killed"),
    ("script", "ps(ssp(3))", "step", "server killed"),
    ("script", "gossip", "warm-up", "worker killed"),
    ("script", "ps(ssp(3))", "epoch", "leave"),
    ("script", "overlap_local_sgd", "step", "join"),
    ("script", "gossip", "step", "killed after a loss"),
    ("job", "ps(ssp(3))", "step", "killed after a loss"),
]


@pytest.mark.parametrize(("kind", "strategy", "schedule", "event"), few(CELLS, *CHOSEN))
def test_a_run_continues_after_an_event(kind: str, strategy: str, schedule: str, event: str, tmp_path: Path) -> None:
    """A script checks at every step that its learning rate is that of its step."""
    _table[kind, strategy, schedule, event] = "failed"
    workers = "3" if event in ("worker killed", "leave", "killed after a loss") else "2"
    more = {"join": ["--max-workers", "3"], "leave": ["--min-workers", "1"], "worker killed": ["--min-workers", "1"]}
    if kind == "script":
        script = [write_scheduled_script(tmp_path), strategy, schedule, str(STEPS)]
        words, program = ["launch", "-n", workers], script
    else:
        words = [*paced_train(tmp_path, strategy, int(workers), STEPS), "--schedule", JOB_SCHEDULES[schedule]]
        program = []
    if (point := EVENTS[event]) is not None:
        words += ["--import", write_failpoint(tmp_path, point)]
    run = RealRun([*words, *EVERY, *more.get(event, []), *program], tmp_path / "run", torch=kind == "script")
    if event == "join":
        run.wait_for_work(5)
        assert run_command(["join", str(run.record)]) == 0
        go_on(tmp_path)
    elif event == "killed after a loss":
        kill_after_loss(run)
    ended = run.end()
    if event in ("all killed", "killed after a loss"):
        assert ended.code != 0
        go_on(tmp_path)
        ended = RealRun(["resume"], run.record, torch=kind == "script").end()
    assert ended.code == 0, ended.err
    assert (signalled(tmp_path) is not None) == (point is not None), "the event has not happened"
    summary = RunFolder(run.record).read_summary()
    assert summary.status == "finished"
    if event in ("leave", "join"):
        assert "; 0 recorded steps were repeated" in summary.notes[0]
    _table[kind, strategy, schedule, event] = "continues"
