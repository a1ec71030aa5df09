"""Runs on Ray: a cluster of two nodes, whose actors are the agents of the hosts."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from flockstep.experiments.single import RunResult
from flockstep.records.events import LostEvent, StepEvent
from support.processes import MEMORY, PATIENCE, RealRun, wait_until
from support.ray_cluster import RayCluster

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
ON = ("--on", "ray", "--transport", "tcp(memory=true)")
LONG = ("--steps", "1000000", "-n", "4", "--evaluate-every", "100000")
PROGRAM = """
import flockstep
import ray
ray.init(address="auto", logging_level="error")
run = flockstep.on_ray({job!r}, "easgd", 2, nodes=2, steps=40, seed=1, out={out!r})
assert ray.is_initialized(), "the program's own connection stays"
print(run.summary.status, run.summary.workers, len(run.parameters()[0]))
raise SystemExit(0)
"""
JOB = """
from flockstep.workloads.softmax import Softmax
def job():
    return Softmax(train=512).job(0)
"""
SCRIPT = """
import os, sys
import numpy as np
import flockstep
communicator = flockstep.join()
total = communicator.all_reduce(np.full(3, flockstep.rank() + 1.0))
print("place", *(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")), sys.argv[1:])
print("total", total, flush=True)
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
    made = RayCluster(tmp_path)
    try:
        for name, value in made.environment.items():
            monkeypatch.setenv(name, value)
        yield made
    finally:
        made.close()


def ranks_of(run: RunResult) -> set[int]:
    return {event.rank for event in run.events() if isinstance(event, StepEvent)}


def test_a_job_on_two_nodes_ends_with_the_bits_of_one_host(cluster: RayCluster, tmp_path: Path) -> None:
    arguments = ["train", "softmax", "-s", "all_reduce(ring)", "-n", "4", "--steps", "60", "--seed", "1"]
    there = RealRun([*arguments, *ON], tmp_path / "there").end()
    assert there.code == 0, there.err
    here = RealRun([*arguments, *MEMORY], tmp_path / "here").end()
    assert there.summary is not None
    assert here.summary is not None
    assert there.summary["hashes"] == here.summary["hashes"]
    assert there.summary["best_metric"] > 0.7, "it learns"
    run = RunResult.read(tmp_path / "there")
    assert ranks_of(run) == {0, 1, 2, 3}
    assert run.parameters()[0].shape == (210,)
    wait_until(lambda: not cluster.agents(), PATIENCE, "the end of the actors")


@pytest.mark.full
def test_a_lost_node_is_a_loss_of_its_workers(cluster: RayCluster, tmp_path: Path) -> None:
    """Two neighbors of four are lost with their node, whichever node Ray gave them; the other two continue."""
    run = RealRun(["train", "softmax", "-s", "gossip", *LONG, *ON], tmp_path / "run")
    wait_until(lambda: all(run.steps(rank) > 50 for rank in range(4)) or not run.going(), PATIENCE, "steps of everyone")
    assert run.going(), run.err
    assert set(cluster.workers()) == {f"worker-{rank}" for rank in range(4)}
    cluster.lose_second_node()
    wait_until(lambda: run.err.count("was lost with its host") == 2 or not run.going(), PATIENCE, "two losses")
    left = [rank for rank in range(4) if f"worker {rank} was lost" not in run.err]
    assert left in ([0, 1], [2, 3]), run.err
    before = [run.steps(rank) for rank in left]
    wait_until(lambda: all(run.steps(rank) > n + 50 for rank, n in zip(left, before, strict=True)), PATIENCE, "steps")
    assert run.going(), run.err
    run.fault(signal.SIGINT, "main")
    ended = run.end()
    assert ended.code == 130, ended.err
    found = RunResult.read(tmp_path / "run")
    lost = {event.node: event.reason for event in found.events() if isinstance(event, LostEvent)}
    assert set(lost) == {0, 1, 2, 3} - set(left)
    assert all("was lost with its host" in reason for reason in lost.values())
    assert found.summary.status == "interrupted"
    wait_until(lambda: not cluster.agents(), PATIENCE, "the end of the actors")


@pytest.mark.full
def test_a_lost_node_ends_a_synchronous_run(cluster: RayCluster, tmp_path: Path) -> None:
    run = RealRun(["train", "softmax", "-s", "all_reduce", *LONG, *ON], tmp_path / "run")
    wait_until(lambda: all(run.steps(rank) > 50 for rank in range(4)) or not run.going(), PATIENCE, "steps of everyone")
    assert run.going(), run.err
    cluster.lose_second_node()
    ended = run.end()
    assert ended.code == 1
    assert "was lost with its host" in ended.err
    assert RunResult.read(tmp_path / "run").summary.status == "failed"
    wait_until(lambda: not cluster.agents(), PATIENCE, "the end of the actors")


@pytest.mark.full
def test_a_script_and_a_program(cluster: RayCluster, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = RealRun(["launch", "-n", "4", *ON, str(script), "--rate", "1"], tmp_path / "launch").end()
    assert ended.code == 0, ended.err
    for rank in range(4):
        assert f"place {rank} {rank % 2} 4 2 ['--rate', '1']" in ended.out
    assert ended.out.count("total [10. 10. 10.]") == 4
    job, out = tmp_path / "mine.py", tmp_path / "program"
    job.write_text(JOB)
    ended = RealRun(["train"], tmp_path / "none", before=PROGRAM.format(job=str(job), out=str(out)), afresh=True).end()
    assert ended.code == 0, ended.err
    assert "finished 2 210" in ended.out
    assert ranks_of(RunResult.read(out)) == {0, 1}
    refused = RealRun(["train", "softmax", "-s", "bsp", "-n", "6", *ON, "--timeout", "1"], tmp_path / "full").end()
    assert refused.code == 2
    assert "did not give 2 nodes" in refused.err
    wait_until(lambda: not cluster.agents(), PATIENCE, "the end of the actors")


def test_without_a_cluster_the_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    ended = RealRun(["train", "softmax", "-s", "bsp", "-n", "2", *ON], tmp_path / "run").end()
    assert ended.code == 2
    assert ended.err.startswith("flockstep: no Ray cluster runs on this machine; start a cluster with: ray start")
