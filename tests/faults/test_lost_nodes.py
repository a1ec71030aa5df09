"""A node dies or stops in the middle of a real run: the others end with a sentence, or go on where they can."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flockstep.launchers.children import Forked, fork, kill_all
from flockstep.launchers.entry import worker_main
from flockstep.launchers.peers import ProcessLink, RunPeer
from flockstep.records.config import RunConfig
from flockstep.runtime.member import NodeSpec
from flockstep.runtime.setup import prepare
from support.jobs import go_on, paced, supervised
from support.matrix import few
from support.processes import IPC, MEMORY, PATIENCE, RealRun, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")

NEEDS_EVERYONE = few(
    ["all_reduce", "ps(consistency=bsp)", "ps(consistency=ssp(0))", "local_sgd"], "all_reduce", "ps(consistency=bsp)"
)
"""Whom a peer waits for, and whom a server waits for."""
SURVIVES = few(
    [
        *("asgd", "ps(consistency=ssp(3))", "easgd", "gossip", "broadcast", "partial"),
        *("dpsgd", "adpsgd(tree)", "sgp", "sgp(tau=2)"),
    ],
    *("asgd", "gossip", "dpsgd"),
)
"""With a server, with a collector at the end, with neighbors whose weights change."""


def started(
    strategy: str,
    folder: Path,
    steps: int,
    heartbeat: float = 5.0,
    job: str = "softmax",
    transport: Sequence[str] = IPC,
) -> RealRun:
    options = ["-n", "3", "--steps", str(steps), "--heartbeat", str(heartbeat), "--seed", "1", *transport]
    run = RealRun(["train", job, "-s", strategy, "--target", "0.5", *options], folder / "run")
    run.wait_for_work()
    return run


@pytest.mark.parametrize("strategy", NEEDS_EVERYONE)
def test_where_everyone_is_needed_a_killed_worker_ends_the_run(strategy: str, tmp_path: Path) -> None:
    run = started(strategy, tmp_path, steps=1_000_000, transport=MEMORY)
    run.fault(signal.SIGKILL, "worker-1")
    ended = run.end()
    assert ended.seconds < ended.limit
    assert ended.code == 1
    assert ended.err.startswith("flockstep: worker 1 was killed by SIGKILL")
    assert "at about step" in ended.err
    assert "waited for" in ended.err or "could not continue" in ended.err, "a server may wait for no message"
    assert len(ended.err.strip().splitlines()) == 1
    assert ended.summary is not None
    assert ended.summary["status"] == "failed"
    assert "worker 1 was killed by SIGKILL" in ended.summary["error"]
    assert [lost["node"] for lost in ended.summary["lost"]] == [1]
    assert 0 < ended.summary["lost"][0]["seconds"] <= ended.summary["seconds"]
    assert all(worker["steps"] >= 50 for worker in ended.summary["per_worker"])
    assert ended.summary["best_metric"] is not None, "evaluations handed in before the fault are kept"


@pytest.mark.parametrize("strategy", SURVIVES)
def test_where_it_can_be_done_without_the_others_go_on(strategy: str, tmp_path: Path) -> None:
    steps = 200
    run = started(strategy, tmp_path, steps, job=paced(tmp_path, slow_after=60))
    run.fault(signal.SIGKILL, "worker-1")
    wait_until(lambda: "2 of 3 workers continue" in run.err or not run.going(), PATIENCE, "the other workers continue")
    go_on(tmp_path)
    ended = run.end()
    assert ended.code == 0
    said = r"flockstep: worker 1 was killed by SIGKILL at about step \d+; 2 of 3 workers continue"
    assert re.fullmatch(said, ended.err.splitlines()[-1]), ended.err
    assert ended.summary is not None
    assert ended.summary["status"] == "finished"
    assert [lost["node"] for lost in ended.summary["lost"]] == [1]
    taken = {worker["rank"]: worker["steps"] for worker in ended.summary["per_worker"]}
    assert taken[0] == taken[2] == steps
    assert 0 < taken[1] < steps
    assert ended.summary["final_metric"] > 0.8


@pytest.mark.parametrize(
    "strategy",
    few(
        ["ps(consistency=bsp)", "asgd", "easgd", "ps(consistency=asynchronous, shards=2)"],
        "ps(consistency=asynchronous, shards=2)",
    ),
)
def test_a_killed_server_ends_the_run(strategy: str, tmp_path: Path) -> None:
    run = started(strategy, tmp_path, steps=1_000_000)
    run.fault(signal.SIGKILL, "server-0")
    ended = run.end()
    assert ended.seconds < ended.limit
    assert ended.code == 1
    assert ended.err.startswith("flockstep: server 0 was killed by SIGKILL")


@pytest.mark.parametrize(
    ("strategy", "node"),
    few(
        [("all_reduce", "worker-1"), ("asgd", "server-0"), ("local_sgd", "worker-0")],
        ("asgd", "server-0"),
    ),
)
def test_a_stopped_process_is_noticed_within_the_heartbeat(strategy: str, node: str, tmp_path: Path) -> None:
    run = started(strategy, tmp_path, steps=1_000_000, heartbeat=3)
    run.fault(signal.SIGSTOP, node)
    ended = run.end()
    assert ended.summary is not None
    assert ended.code == 1
    assert f"{node.replace('-', ' ')} has not answered for 3 s" in ended.err
    assert 3 <= ended.seconds < 3 + ended.limit, "a shorter pause loses no process"


def test_the_others_go_on_without_a_stopped_worker_and_it_never_comes_back(tmp_path: Path) -> None:
    run = started("asgd", tmp_path, steps=200, heartbeat=3, job=paced(tmp_path, slow_after=60))
    run.fault(signal.SIGSTOP, "worker-1")
    wait_until(lambda: "2 of 3 workers continue" in run.err or not run.going(), PATIENCE, "the other workers continue")
    go_on(tmp_path)
    ended = run.end()
    assert ended.code == 0
    assert re.match(
        r"flockstep: worker 1 has not answered for 3 s at about step \d+; 2 of 3 workers continue\n", ended.err
    )
    assert ended.summary is not None
    assert [lost["reason"][:32] for lost in ended.summary["lost"]] == ["worker 1 has not answered for 3 "]


@pytest.mark.parametrize("kind", few([signal.SIGKILL, signal.SIGSTOP], signal.SIGSTOP))
def test_a_node_that_nobody_here_has_started_is_lost_by_its_link(
    kind: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on another host: the supervisor knows no process, the workers know no supervisor's."""
    config = prepare(RunConfig(kind="train", job="softmax", strategy="all_reduce", workers=2, steps=1_000_000))[2]
    workers, sent = list[Forked](), list[signal.Signals]()

    def start(node_spec: NodeSpec) -> None:
        workers.append(fork(worker_main, (replace(node_spec, supervisor=0), 1, config.to_toml())))

    def signal_once(standings: dict[int, RunPeer], steps: int) -> None:
        if min(one.step for one in standings.values()) > 50 and not sent:
            sent.append(kind)
            os.kill(workers[1].pid, kind)

    send, models = ProcessLink.tell, list[object]()

    def counted(wire: ProcessLink, tag: str, note: Any = None, array: Any = None) -> None:
        models.extend([] if array is None else [tag])
        send(wire, tag, note, array)

    monkeypatch.setattr(ProcessLink, "tell", counted)
    folder = tmp_path / "run"
    of_run = replace(config, transport="ipc", heartbeat=3.0)
    supervisor = supervised(of_run, folder, start, signal_once)
    try:
        outcome = supervisor.run()
        assert re.match(r"worker 1 has ended, or has not answered for 3 s at about step \d+", str(outcome.error))
        assert set(outcome.lost) == {1}
        assert models == [], "the workers have the first model from one another"
        if kind == signal.SIGSTOP:
            os.kill(workers[1].pid, signal.SIGCONT)  # what was only stopped finds that it takes part no more
        for worker in workers:
            wait_until(lambda worker=worker: worker.exit_code() is not None, PATIENCE, "the workers end by themselves")  # type: ignore[misc]
    finally:
        supervisor.collection.forget()
        kill_all(workers)


def test_a_run_without_faults_loses_nobody(tmp_path: Path) -> None:
    job = paced(tmp_path, slow_after=0)
    arguments = ["train", job, "-s", "all_reduce", "-n", "3", "--steps", "15", "--heartbeat", "3"]
    arguments += ["--target", "0.5"]
    ended = RealRun(arguments, tmp_path / "run").end()  # longer than a heartbeat
    assert (ended.code, ended.err) == (0, "")
    assert ended.summary is not None
    assert ended.summary["lost"] == []
    assert ended.summary["replicas_agree"] is True


BUSY_JOB = """
import ctypes
from flockstep.workloads.softmax import Softmax

def job():
    job = Softmax().job(0)
    model = job.model()
    plain = type(model).gradients

    class Busy(type(model)):
        def gradients(self, *arguments):
            if len(arguments[1]) == 1:
                ctypes.PyDLL(None).sleep(4)
            return plain(self, *arguments)

    model.__class__ = Busy
    return type(job)(lambda: model, job.data, job.optimizer, batch=4)
"""


def test_a_long_gradient_is_not_taken_for_death(tmp_path: Path) -> None:
    """For longer than the heartbeat no thread of the interpreter runs, but its sockets answer."""
    (tmp_path / "busy.py").write_text(BUSY_JOB)
    arguments = ["train", str(tmp_path / "busy.py"), "-s", "asgd", "-n", "2", "--steps", "1", "--heartbeat", "3"]
    ended = RealRun(arguments, tmp_path / "run").end()
    assert (ended.code, ended.err) == (0, "")
    assert ended.summary is not None
    assert ended.summary["lost"] == []
    assert ended.summary["seconds"] > 3
