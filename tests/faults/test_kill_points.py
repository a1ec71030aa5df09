"""Every strategy, and a worker, a server or the launcher of it killed in each phase of a run: no invariant breaks.

A combination that does not exist, because the strategy has no server, takes no checkpoints or sends no messages, is no
case.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from flockstep import registry
from flockstep.errors import ConfigurationError
from flockstep.launchers.simulate import simulate
from flockstep.messages import server
from flockstep.records.config import RunConfig
from flockstep.records.folder import RunFolder
from flockstep.strategies.base import Strategy
from flockstep_lab.chaos.base import Expected, Setting, after_death, after_server_death
from flockstep_lab.chaos.campaign import lost_in
from flockstep_lab.chaos.invariants import RunHistory, broken
from flockstep_lab.failure_matrix import rows
from support.jobs import go_on, paced
from support.matrix import few
from support.processes import Ended, RealRun

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes by their names in /proc")

STEPS, EVERY = 60, 10
POINTS = {
    "worker": {
        "step": ("worker-1", "gradient.computed"),
        "push": ("worker-1", "message.sent"),
        "checkpoint": ("worker-1", "shard.written"),
        "meeting": ("worker-1", "meeting.begun"),
        "end": ("worker-1", "program.ended"),
    },
    "server": {
        "step": ("server-0", "message.received"),
        "push": ("server-0", "message.sent"),
        "checkpoint": ("server-0", "shard.written"),
        "meeting": ("server-0", "meeting.begun"),
        "end": ("server-0", "program.ended"),
    },
    "launcher": {
        "step": ("worker-1", "gradient.computed"),
        "push": ("worker-1", "message.sent"),
        "checkpoint": ("launcher", "manifest.begun"),
        "meeting": ("launcher", "meeting.begun"),
        "end": ("launcher", "run.ended"),
    },
}
"""Who is killed → phase of the run → the process that comes to a point of the code, and the point."""
SILENT = {"ensemble", "hogwild"}
"""Strategies whose nodes send each other nothing."""
KILL = """
import os, signal
from pathlib import Path
from flockstep.records import failpoints

HERE, WHO, POINT, VICTIM, WAITS = Path(__file__).parent, {who!r}, {point!r}, {victim!r}, {waits!r}
steps = []

def kill(point):
    steps.append(point)
    if point != POINT or (HERE / "fired").exists():
        return
    name = Path("/proc/self/comm").read_text().strip()
    if (name if name.startswith(("worker-", "server-")) else "launcher") != WHO:
        return
    if WAITS == "checkpoint" and not any(HERE.glob("run/checkpoints/*/manifest.json")):
        return
    if WAITS == "steps" and len(steps) < 20:
        return
    (HERE / "fired").touch()
    os.kill(int((HERE / "launcher").read_text()) if VICTIM == "launcher" else os.getpid(), signal.SIGKILL)

if not failpoints.hooks:
    failpoints.hooks.append(kill)
"""


def setting_of(strategy: Strategy) -> Setting:
    """A run with the fewest workers, at least two, that the strategy allows."""
    for workers in (2, 3):
        try:
            strategy.check(workers)
        except ConfigurationError:
            continue
        return Setting("paced.py", strategy, workers, STEPS, 0, 5.0)
    return Setting("paced.py", strategy, 4, STEPS, 0, 5.0)


def strategies() -> list[Strategy]:
    """The first composition of every strategy in the failure matrix."""
    found: dict[str, Strategy] = {}
    for row in rows():
        found.setdefault(registry.name_of(type(row.composed)), row.composed)
    return list(found.values())


def cases() -> Iterator[tuple[str, str, str]]:
    """Strategy, who is killed, and in which phase."""
    for strategy in strategies():
        setting, name = setting_of(strategy), registry.name_of(type(strategy))
        for who, phases in POINTS.items():
            for phase in phases if who != "server" or setting.servers else ():
                if not (phase == "checkpoint" and not setting.resumes) and not (phase == "push" and name in SILENT):
                    yield str(strategy), who, phase


def test_every_strategy_is_killed_in_every_phase_that_it_has() -> None:
    found = set(cases())
    assert {registry.name_of(type(one)) for one in strategies()} == set(registry.names("strategy"))
    assert ("all_reduce", "worker", "push") in found
    assert not any(one[:2] == ("all_reduce", "server") or (one[0] == "hogwild" and one[2] == "push") for one in found)


def expected(setting: Setting, who: str, phase: str) -> Expected:
    """How the run must end; `resumes` says that the same command with `--resume` must finish a run that failed."""
    if who == "launcher":
        return Expected((-9,), resumes=True)
    node, name = (1, "worker 1") if who == "worker" else (server(0), "server 0")
    if phase == "meeting":
        return Expected((1,), frozenset({node}), True, f"{name} was killed by SIGKILL")
    if who == "worker":
        ends = after_death(1, setting)
        return ends if setting.survives else Expected(ends.codes, ends.lost, True, ends.says)
    return (
        after_server_death(0) if setting.resumes and phase != "end" else Expected((1,), frozenset({node}), True, name)
    )


def at_the_end(ends: Expected, code: int, lost: frozenset[int]) -> Expected:
    """What a process has sent last may have arrived, then the run is whole, or not, then it fails as in a step."""
    return Expected(lost=lost) if code == 0 and lost <= ends.lost else ends


def killed(folder: Path, setting: Setting, who: str, phase: str) -> RealRun:
    """A run of which a process is killed."""
    at, point = POINTS[who][phase]
    waits = "" if phase in ("meeting", "end") else "checkpoint" if setting.resumes else "steps"
    (folder / "kill.py").write_text(KILL.format(who=at, point=point, victim=who, waits=waits))
    run = command(folder, setting)
    (folder / "half").write_text(str(run.main.pid))
    (folder / "half").rename(folder / "launcher")
    return run


def command(folder: Path, setting: Setting, *more: str) -> RealRun:
    words = ["train", paced(folder), "-s", str(setting.strategy), "-n", str(setting.workers), "--steps", str(STEPS)]
    words += ["--evaluate-every", "30", "--import", str(folder / "kill.py"), *more]
    return RealRun([*words, *(["--checkpoint-every", str(EVERY)] if setting.resumes else [])], folder / "run")


@cache
def uninterrupted(strategy: str, workers: int, folder: Path) -> bytes:
    """The resulting model of the same job in virtual time, of which no process died."""
    config = RunConfig(
        kind="simulate",
        job=paced(folder),
        strategy=strategy,
        workers=workers,
        steps=STEPS,
        evaluate_every=30,
        threads=1,
    )
    simulate(config, folder / "virtual", lambda done, every, t: None, False)
    return RunFolder(folder / "virtual").read_result()[0].tobytes()


@pytest.mark.parametrize(
    ("strategy", "who", "phase"),
    few(cases(), ("all_reduce", "worker", "push"), ("ps(consistency=bsp)", "server", "push")),
)
def test_a_process_killed_in_a_phase_breaks_no_invariant(strategy: str, who: str, phase: str, tmp_path: Path) -> None:
    setting = setting_of(Strategy.parse(strategy))
    ends, record = expected(setting, who, phase), RunFolder(tmp_path / "run")
    ended = [killed(tmp_path, setting, who, phase).end()]
    lost = lost_in(record.path)
    if phase == "end" and who != "launcher":
        ends = at_the_end(ends, ended[0].code, lost)
    go_on(tmp_path)
    if ends.resumes and ended[0].code:
        ended.append(command(tmp_path, setting, "--resume").end())
    assert history(tmp_path, setting, ends, ended, lost) == []


def history(folder: Path, setting: Setting, ends: Expected, ended: list[Ended], lost: frozenset[int]) -> list[str]:
    """The invariants that a run has violated; `RealRun.end` has looked for what it has left behind."""
    record = RunFolder(folder / "run")
    found, result = record.read(), record.result_file
    synchronous = setting.strategy.traits.delivery == "synchronous"
    return broken(
        RunHistory(
            setting, ends, found.events, found.summary, [one.code for one in ended], (folder / "fired").exists(), False,
            "".join(one.err for one in ended), record.read_result()[0].tobytes() if result.exists() else None,
            uninterrupted(str(setting.strategy), setting.workers, folder) if synchronous else None, (), record.path,
            lost,
        )
    )  # fmt: skip
