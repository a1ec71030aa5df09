"""A stage of a split model dies in a real run: the run ends with a sentence, or the other replicas go on."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from support.processes import PATIENCE, RealRun, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")

JOB = """
import time
from dataclasses import replace
from pathlib import Path

import torch
from flockstep.workloads.models import squared_error
from support.split_jobs import job_of


def loss(outputs, targets):
    while torch.is_grad_enabled() and not Path({gate!r}).exists() and loss.calls >= 60:
        time.sleep(0.01)
    loss.calls += torch.is_grad_enabled()
    return squared_error(outputs, targets)


loss.calls = 0


def job():
    return replace(job_of(), loss=loss)
"""
"""After 60 losses (14 steps of four, and three trials before the run), the job waits until the file `gate` exists."""


def started(strategy: str, folder: Path, workers: int = 4) -> tuple[RealRun, Path]:
    gate = folder / "go"
    (folder / "paced.py").write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\n" + JOB.format(gate=str(gate))
    )
    split = ["--partition", "pipeline(2, 1f1b, 4)", "-n", str(workers), "--steps", "30", "--evaluate-every", "10"]
    run = RealRun(["train", str(folder / "paced.py"), "-s", strategy, *split], folder / "run", torch=True)
    run.wait_for_work(6)  # the events of the last steps may be held back while a loss waits
    return run, gate


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [("all_reduce", 4), pytest.param("gossip", 2, marks=pytest.mark.full)],
)
def test_a_killed_stage_ends_the_run(tmp_path: Path, strategy: str, workers: int) -> None:
    run, _ = started(strategy, tmp_path, workers)
    run.fault(signal.SIGKILL, "worker-1")
    ended = run.end()
    assert ended.code == 1
    assert len(ended.err.strip().splitlines()) == 1, ended.err
    lost = r"worker 1 was killed by SIGKILL at about step \d+; it held stage 1 of replica 0"
    assert re.search(lost, ended.err), ended.err
    assert ended.summary is not None
    assert ended.summary["status"] == "failed"
    assert 1 in [one["node"] for one in ended.summary["lost"]]


@pytest.mark.parametrize("strategy", ["gossip", pytest.param("asgd", marks=pytest.mark.full)])
def test_a_replica_leaves_with_its_stage_where_the_strategy_survives(tmp_path: Path, strategy: str) -> None:
    run, gate = started(strategy, tmp_path)
    run.fault(signal.SIGKILL, "worker-3")
    wait_until(lambda: "2 of 4 workers continue" in run.err or not run.going(), PATIENCE, "the other replica continues")
    gate.touch()
    ended = run.end()
    assert ended.code == 0, ended.err
    assert "it held stage 1 of replica 1" in ended.err
    assert ended.summary is not None
    assert ended.summary["status"] == "finished"
    assert {one["node"] for one in ended.summary["lost"]} == {2, 3}
    taken = {worker["rank"]: worker["steps"] for worker in ended.summary["per_worker"]}
    assert taken[0] == taken[1] == 30
    assert max(taken[2], taken[3]) < 30
    assert np.isfinite(np.load(tmp_path / "run" / "result.npy")).all()
