"""A server with a backup dies in the middle of whatever it does: the run goes on with every push applied once."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from flockstep.launchers.simulate import simulate
from flockstep.records.config import RunConfig
from flockstep.records.events import PromotedEvent, StepEvent, UpdateEvent
from flockstep.records.folder import RunFolder
from flockstep.strategies.base import Strategy
from flockstep_lab.chaos.base import Failpoint
from flockstep_lab.chaos.failpoint import signalled, write_failpoint
from support.jobs import go_on, paced
from support.matrix import few
from support.processes import PATIENCE, Ended, RealRun, alive, state, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes by their names in /proc")

STEPS = 80
POINTS = [
    ("message.received", 101),  # a push, before it is in the log or applied; or the backup's acknowledgment
    ("message.received", 102),
    ("message.received", 103),
    ("message.received", 104),
    ("update.applied", 61),  # before the backup has acknowledged the push
    ("message.sent", 101),  # an entry of the log, an acknowledgment, or an answer
    ("message.sent", 102),
    ("message.sent", 103),
    ("message.sent", 104),
]


def begin(folder: Path, strategy: str, *more: str, before: str = "") -> RealRun:
    words = ["train", paced(folder), "-s", strategy, "-n", "2", "--steps", str(STEPS), "--evaluate-every", "20"]
    return RealRun([*words, *more], folder / "run", before=before)


def uninterrupted(folder: Path, strategy: str) -> bytes:
    """The resulting model of the same job in virtual time, whose servers have no backups and do not die."""
    config = RunConfig(
        kind="simulate", job=paced(folder), strategy=strategy, workers=2, steps=STEPS, evaluate_every=20, threads=1
    )
    simulate(config, folder / "virtual", lambda done, every, t: None, False)
    return RunFolder(folder / "virtual").read_result()[0].tobytes()


def disrupted(folder: Path, strategy: str, failpoint: Failpoint, *more: str, before: str = "") -> tuple[RealRun, int]:
    """A run whose process has come to the failpoint, and the id of the process; fails if it does not come there."""
    run = begin(folder, strategy, "--import", write_failpoint(folder, failpoint), *more, before=before)
    wait_until(lambda: signalled(folder) is not None or not run.going(), PATIENCE, "the server gets its signal")
    pid = signalled(folder)
    assert pid is not None, f"the fault did not fire: {run.err}"
    return run, pid


def check(folder: Path, ended: Ended, strategy: str, promotions: int = 1) -> None:
    """Every step is in the record once, every gradient was applied once by each server, all evaluations are there."""
    assert ended.code == 0, ended.err
    record = RunFolder(folder / "run")
    summary, events = record.read_summary(), record.read_events()
    assert summary.status == "finished"
    for rank in range(2):
        steps = [event.step for event in events if isinstance(event, StepEvent) and event.rank == rank]
        assert steps == list(range(1, STEPS + 1))
    promoted = [event for event in events if isinstance(event, PromotedEvent)]
    assert len(promoted) == promotions
    plain = Strategy.parse(strategy)
    applied: Counter[tuple[int, int]] = Counter()
    for event in events:
        if isinstance(event, UpdateEvent):
            for source in range(2) if event.source is None else [event.source]:
                applied[event.node, source] += event.count
    if plain.traits.server_optimizer:
        assert applied == {(node, rank): STEPS for node in range(-plain.servers_for(2), 0) for rank in range(2)}
    if plain.traits.delivery == "synchronous":
        assert record.read_result()[0].tobytes() == uninterrupted(folder, strategy)
    assert summary.final_metric is not None
    assert summary.final_metric > 0.8


@pytest.mark.parametrize(
    ("strategy", "who", "point", "number"),
    few(
        [
            *[("ps(bsp)", "server-0", *point) for point in POINTS],
            *[("ps(asynchronous)", "server-0", *point) for point in POINTS[4:7]],
            ("ps(ssp(3), shards=2)", "server-1", "update.applied", 61),
            ("ps(bsp, shards=2, codec=topk(0.2), feedback=residual)", "server-1", "message.sent", 102),
            ("easgd(period=2)", "server-0", "message.received", 61),
            ("downpour(1, 1)", "server-0", "update.applied", 61),
            ("hierarchical(group=1)", "server-0", "message.received", 101),
            ("hierarchical(group=1)", "server-2", "message.sent", 101),
            ("gradient_coding(s=0)", "server-0", "message.received", 101),
        ],
        ("ps(bsp)", "server-0", "update.applied", 61),
    ),
)
def test_the_backup_takes_the_place_of_a_killed_server(
    strategy: str, who: str, point: str, number: int, tmp_path: Path
) -> None:
    run, _ = disrupted(tmp_path, f"{strategy[:-1]}, replicas=1)", Failpoint(who, point, number))
    index, servers = int(who[-1]), Strategy.parse(strategy).servers_for(2)
    wait_until(lambda: "continues in its place" in run.err or not run.going(), PATIENCE, "the backup continues")
    go_on(tmp_path)
    ended = run.end()
    check(tmp_path, ended, strategy)
    note = rf"server {index} was killed by SIGKILL; server {index + servers}, its backup, continues in its place"
    assert re.search(note, ended.err)
    assert ended.summary is not None
    assert any(re.fullmatch(note, one) for one in ended.summary["notes"])


@pytest.mark.full
def test_the_death_of_a_backup_stops_nobody(tmp_path: Path) -> None:
    run, _ = disrupted(tmp_path, "ps(bsp, replicas=1)", Failpoint("server-1", "update.applied", 61))
    go_on(tmp_path)
    ended = run.end()
    check(tmp_path, ended, "ps(bsp)", promotions=0)
    assert "server 1 was killed by SIGKILL; server 0, whose backup it was, continues" in ended.err


KILLS_TWO = """
import os, signal
from pathlib import Path
from flockstep.records import failpoints

HERE, reached = Path(__file__).parent, []

def kill(point):
    name = Path("/proc/self/comm").read_text().strip()
    reached.append(point)
    if (name, point) == ("server-1", "replica.promoted") or (
        name == "server-0" and point == "update.applied" and reached.count(point) == 61
    ):
        (HERE / f"fired-{name}").touch()
        os.kill(os.getpid(), signal.SIGKILL)

if not failpoints.hooks:
    failpoints.hooks.append(kill)
"""


@pytest.mark.full
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_backup_that_dies_while_it_takes_over(replicas: int, tmp_path: Path) -> None:
    """With two backups the second one continues, with the same bits; with one the run ends with a sentence."""
    file = tmp_path / "kills.py"
    file.write_text(KILLS_TWO)
    run = begin(tmp_path, f"ps(bsp, replicas={replicas})", "--import", str(file))
    wait_until(lambda: (tmp_path / "fired-server-1").exists() or not run.going(), PATIENCE, "both processes are killed")
    go_on(tmp_path)
    ended = run.end()
    assert (tmp_path / "fired-server-0").exists()
    assert (tmp_path / "fired-server-1").exists()
    if replicas == 2:
        check(tmp_path, ended, "ps(bsp)")
        return
    assert ended.code == 1
    assert "server 1 was killed by SIGKILL" in ended.err.splitlines()[-1]


KILLS_BOTH = """
import os, signal
from pathlib import Path
from flockstep.records import failpoints

HERE, reached = Path(__file__).parent, []

def kill(point):
    name = Path("/proc/self/comm").read_text().strip()
    if (name, point) not in (("worker-1", "gradient.computed"), ("server-0", "update.applied")):
        return
    reached.append(point)
    told = (HERE / "run" / "events" / "server-1.jsonl").read_bytes().count(b'"type":"lost"')
    if (name == "worker-1" and len(reached) == 20) or (name == "server-0" and told):
        (HERE / f"fired-{name}").touch()
        os.kill(os.getpid(), signal.SIGKILL)

if not failpoints.hooks:
    failpoints.hooks.append(kill)
"""


@pytest.mark.full
def test_a_worker_dies_and_then_the_server_whose_answer_it_had(tmp_path: Path) -> None:
    """The backup keeps the last answer to the dead worker, which it cannot send."""
    file = tmp_path / "kills.py"
    file.write_text(KILLS_BOTH)
    run = begin(tmp_path, "ps(ssp(3), replicas=1)", "--import", str(file))
    wait_until(lambda: (tmp_path / "fired-server-0").exists() or not run.going(), PATIENCE, "both are killed")
    go_on(tmp_path)
    ended = run.end()
    assert ended.code == 0, ended.err
    assert (tmp_path / "fired-worker-1").exists()
    assert (tmp_path / "fired-server-0").exists()
    events = RunFolder(tmp_path / "run").read_events()
    taken = Counter(event.rank for event in events if isinstance(event, StepEvent))
    applied = Counter(event.source for event in events if isinstance(event, UpdateEvent) and event.node == -1)
    assert taken[0] == applied[0] == STEPS
    assert applied[1] == 19


KILLS_THREE = """
import os, signal
from pathlib import Path
from flockstep.records import failpoints

HERE, reached = Path(__file__).parent, []

def kill(point):
    if point != "update.applied" or Path("/proc/self/comm").read_text() != "server-0\\n":
        return
    reached.append(point)
    fired = len(list(HERE.glob("fired-*")))
    if len(reached) == 33 and fired < 3:
        (HERE / f"fired-{fired}").touch()
        os.kill(os.getpid(), signal.SIGKILL)

if not failpoints.hooks:
    failpoints.hooks.append(kill)
"""


@pytest.mark.full
def test_where_there_are_checkpoints_another_backup_is_started(tmp_path: Path) -> None:
    """The server dies three times, each time with a backup; no step is repeated."""
    file = tmp_path / "kills.py"
    file.write_text(KILLS_THREE)
    run = begin(tmp_path, "ps(bsp, replicas=1)", "--import", str(file), "--checkpoint-every", "10")
    wait_until(lambda: run.err.count("continued from step") == 3 or not run.going(), PATIENCE, "the third new backup")
    assert (tmp_path / "fired-2").exists(), run.err
    go_on(tmp_path)
    ended = run.end()
    check(tmp_path, ended, "ps(bsp)", promotions=3)
    assert ended.summary is not None
    said = (
        r"server 0 was killed by SIGKILL; server 1, its backup, continues in its place; the workers, and new servers, "
    )
    notes = [one for one in ended.summary["notes"] if re.match(said, one)]
    assert len(notes) == 3
    assert all(one.endswith("; 0 recorded steps were repeated") for one in notes)


SPARES_SERVERS = """
from pathlib import Path
from flockstep.launchers.children import Forked

def kill(self, whole=Forked.kill):
    try:
        state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it has ended by itself
        state = "X"
    if state != "T":
        whole(self)

Forked.kill = kill
"""
"""The launcher does not kill a process that is stopped, as if the process were on another host."""


def test_a_server_that_wakes_up_after_another_took_its_place_ends(tmp_path: Path) -> None:
    """SIGSTOP: the server is taken for dead at the heartbeat's limit. SIGCONT: it ends, and changes nothing."""
    failpoint = Failpoint("server-0", "update.applied", 61, signal.SIGSTOP)
    run, pid = disrupted(tmp_path, "ps(bsp, replicas=1)", failpoint, "--heartbeat", "3", before=SPARES_SERVERS)
    wait_until(lambda: "continues in its place" in run.err or not run.going(), PATIENCE, "the backup continues")
    assert state(pid) == "T", run.err
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: not alive(pid), PATIENCE, "the server that woke up ends")
    assert run.going(), run.err
    go_on(tmp_path)
    ended = run.end()
    check(tmp_path, ended, "ps(bsp)")
    assert "server 0 has not answered for 3 s; server 1, its backup, continues in its place" in ended.err
