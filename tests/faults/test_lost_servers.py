"""A server dies: the run goes back to its newest checkpoint by itself, and says how many steps were repeated."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from flockstep.launchers.simulate import simulate
from flockstep.records.config import RunConfig
from flockstep.records.events import StepEvent, UpdateEvent
from flockstep.records.folder import RunFolder
from flockstep.strategies.base import Strategy
from flockstep_lab.chaos.base import Failpoint
from flockstep_lab.chaos.failpoint import signalled, write_failpoint
from support.jobs import go_on, paced
from support.matrix import few
from support.processes import PATIENCE, RealRun, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes by their names in /proc")

STEPS = 120
NOTE = (
    r"server (\d) was killed by SIGKILL; the workers, and new servers, continued from step (\d+); "
    r"(\d+) recorded steps were repeated"
)
SHARDS = "ps(consistency=asynchronous, shards=2)"


def begin(folder: Path, strategy: str, *more: str) -> RealRun:
    words = ["train", paced(folder), "-s", strategy, "-n", "2", "--steps", str(STEPS), "--evaluate-every", "30"]
    return RealRun([*words, "--checkpoint-every", "20", *more], folder / "run")


def uninterrupted(folder: Path, strategy: str) -> bytes:
    """The resulting model of the same job in virtual time, in which no server died."""
    config = RunConfig(
        kind="simulate", job=paced(folder), strategy=strategy, workers=2, steps=STEPS, evaluate_every=30, threads=1
    )
    simulate(config, folder / "virtual", lambda done, every, t: None, False)
    return RunFolder(folder / "virtual").read_result()[0].tobytes()


@pytest.mark.parametrize(
    ("strategy", "who", "point", "number"),
    few(
        [
            ("ps(bsp)", "server-0", "message.received", 101),
            ("ps(bsp)", "server-0", "update.applied", 101),
            ("ps(bsp)", "server-0", "message.sent", 101),
            ("asgd", "server-0", "update.applied", 101),
            ("asgd", "server-0", "message.sent", 101),
            (SHARDS, "server-1", "update.applied", 101),
            ("ps(ssp(3))", "server-0", "message.received", 101),
            ("ps(bsp)", "server-0", "state.before_copy", 2),
            ("ps(bsp)", "server-0", "shard.written", 2),
            ("ps(bsp, shards=2, codec=topk(0.2), feedback=residual)", "server-1", "shard.renamed", 2),
            ("easgd(period=2)", "server-0", "message.received", 101),
        ],
        ("ps(bsp)", "server-0", "update.applied", 101),
        (SHARDS, "server-1", "update.applied", 101),
    ),
)
def test_a_run_goes_on_from_its_checkpoint_after_the_death_of_a_server(
    strategy: str, who: str, point: str, number: int, tmp_path: Path
) -> None:
    """Each gradient that is in the result was applied once, in the middle of whatever the server died."""
    run = begin(tmp_path, strategy, "--import", write_failpoint(tmp_path, Failpoint(who, point, number)))
    wait_until(
        lambda: run.working().keys() >= {"worker-0", "worker-1"} or not run.going(), PATIENCE, "the workers begin"
    )
    before = run.working()
    wait_until(lambda: signalled(tmp_path) is not None or not run.going(), PATIENCE, "the server is killed")
    wait_until(lambda: "continued from step" in run.err or not run.going(), PATIENCE, "the run continues")
    now = run.working()
    assert all(now.get(name, pid) == pid for name, pid in before.items() if name.startswith("worker")), "no new worker"
    go_on(tmp_path)
    ended = run.end()
    assert ended.code == 0, ended.err
    record = RunFolder(tmp_path / "run")
    summary, events = record.read_summary(), record.read_events()
    assert summary.status == "finished"
    found = re.fullmatch(NOTE, summary.notes[0])
    assert found is not None, summary.notes
    assert found[1] == who[-1]
    assert int(found[2]) >= 20
    assert int(found[3]) > 0
    for rank in range(2):
        steps = [event.step for event in events if isinstance(event, StepEvent) and event.rank == rank]
        assert steps == list(range(1, STEPS + 1)), "every step is in the record once"
    if strategy.startswith(("ps", "asgd")):
        applied = Counter((e.node, e.source) for e in events if isinstance(e, UpdateEvent) and e.node < 0)
        servers = range(-Strategy.parse(strategy).servers_for(2), 0)
        assert applied == {(node, rank): STEPS for node in servers for rank in range(2)}
    if Strategy.parse(strategy).traits.delivery == "synchronous":
        assert record.read_result()[0].tobytes() == uninterrupted(tmp_path, strategy)
    assert summary.final_metric is not None
    assert summary.final_metric > 0.8


KILLS_AT_THE_END = """
import os, signal, time
from pathlib import Path
from flockstep.records import failpoints

HERE, computed = Path(__file__).parent, []

def kill(point):
    name = Path("/proc/self/comm").read_text().strip()
    ended = HERE / "ended"
    if name == "worker-1" and point == "program.ended":
        ended.touch()
    elif name == "worker-0" and point == "gradient.computed":
        computed.append(point)
        if len(computed) > 80 and not ended.exists():
            time.sleep(0.1)  # slower than worker 1, whose checkpoints wait for this worker
    elif name == "server-0" and point == "message.received" and ended.exists() and not (HERE / "killed").exists():
        (HERE / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)

if not failpoints.hooks:
    failpoints.hooks.append(kill)
"""


def test_a_run_goes_back_although_a_worker_has_taken_its_last_step(tmp_path: Path) -> None:
    """The worker that has ended takes the steps after the checkpoint again, as the others do."""
    (tmp_path / "kills.py").write_text(KILLS_AT_THE_END)
    run = begin(tmp_path, "asgd", "--import", str(tmp_path / "kills.py"))
    kept = tmp_path / "run" / "checkpoints"
    wait_until(lambda: any(kept.glob("*/manifest.json")), PATIENCE, "a checkpoint")
    go_on(tmp_path)
    ended = run.end()
    assert ended.code == 0, ended.err
    record = RunFolder(tmp_path / "run")
    events = record.read_events()
    assert re.fullmatch(NOTE, record.read_summary().notes[0]), record.read_summary().notes
    for rank in range(2):
        steps = [event.step for event in events if isinstance(event, StepEvent) and event.rank == rank]
        assert steps == list(range(1, STEPS + 1)), "every step is in the record once"
    applied = Counter(event.source for event in events if isinstance(event, UpdateEvent) and event.node < 0)
    assert applied == {0: STEPS, 1: STEPS}


KILLS_AGAIN = """
import os, signal
from pathlib import Path
from flockstep.records import failpoints

ONCE, count = Path(__file__).with_name("once"), []

def kill(point):
    if point != "update.applied" or Path("/proc/self/comm").read_text() != "server-0\\n":
        return
    count.append(point)
    if len(count) == (4 if ONCE.exists() else 101):
        ONCE.touch()
        os.kill(os.getpid(), signal.SIGKILL)

if not failpoints.hooks:
    failpoints.hooks.append(kill)
"""


@pytest.mark.full
def test_a_server_that_dies_again_before_the_next_checkpoint_ends_the_run(tmp_path: Path) -> None:
    file = tmp_path / "kills.py"
    file.write_text(KILLS_AGAIN)
    run = begin(tmp_path, "asgd", "--import", str(file))
    ended = run.end()
    assert ended.code == 1
    assert ended.err.count("continued from step") == 1
    assert "server 0 was killed by SIGKILL" in ended.err.splitlines()[-1]
