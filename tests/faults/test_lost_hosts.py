"""A host of a run vanishes, or its cable is out for a while: each host is a network namespace."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flockstep_lab.chaos.base import Failpoint
from flockstep_lab.chaos.failpoint import signalled, write_failpoint
from support.commands import Process
from support.hosts import PORT, Ended, Host, network, on_all, require, require_idle, summary
from support.jobs import go_on, paced, undisturbed
from support.processes import PATIENCE, RealRun, wait_until


@pytest.fixture
def two() -> Iterator[list[Host]]:
    with network(2) as hosts:
        yield hosts


def start_two(two: list[Host], tmp_path: Path, *arguments: str, job: str = "softmax") -> list[Process]:
    """A long run on two hosts, of which the first step is done."""
    where = ["--nodes", "2", "--coordinator", f"{two[0].address}:{PORT}", "--heartbeat", "3"]
    command = ["train", job, "-n", "4", "--steps", "1000000", *where, *arguments]  # the last --steps counts
    processes = [two[1].start(*command, "--node-rank", "1")]
    processes.insert(0, two[0].start(*command, "--node-rank", "0", "--out", tmp_path / "run"))
    events = tmp_path / "run" / "events"

    def stepping() -> bool:
        return len(list(events.glob("*"))) >= 4 and all(file.stat().st_size for file in events.glob("*worker*"))

    wait_until(lambda: stepping() or any(one.poll() is not None for one in processes), PATIENCE, "all take steps")
    assert stepping(), [Ended.of(process) for process in processes]
    return processes


def test_a_host_that_vanishes_ends_the_run_with_a_sentence(two: list[Host], tmp_path: Path) -> None:
    """Its cable is cut: nothing says so but the silence."""
    processes = start_two(two, tmp_path, "-s", "all_reduce", "--link-timeout", "1")
    two[1].cut()
    ended = [Ended.of(process) for process in processes]
    require(ended, 1, 1)
    away = r"nothing arrived for [0-9.]+ s, and the link was down for [0-9.]+ s, longer than the link timeout of 1 s"
    assert re.search(rf"node 1 \(.*\) is lost: {away}", ended[0].err)
    assert re.search(r"flockstep: worker [23] was lost with its host", ended[0].err)
    assert re.search(away, ended[1].err)
    assert summary(tmp_path / "run")["status"] == "failed"
    require_idle(two)


@pytest.mark.parametrize(
    ("seconds", "mute"),
    [
        (5, None),
        pytest.param(60, None, marks=pytest.mark.full),
        pytest.param(5, 0, marks=pytest.mark.full),  # the second host hears nothing of the coordinator, which hears it
        pytest.param(5, 1, marks=pytest.mark.full),
    ],
)
def test_a_cable_that_is_out_for_a_while_changes_no_bit(
    two: list[Host], tmp_path: Path, seconds: int, mute: int | None
) -> None:
    """The cable is out for longer than the heartbeat, while all workers take steps; or only packets of one host are
    lost.
    """
    arguments = ["-s", "all_reduce(ring)", "--steps", "100", "--seed", "1", "--link-timeout", "90"]
    job = paced(tmp_path, slow_after=20)
    processes = start_two(two, tmp_path, *arguments, job=job)
    two[1].cut() if mute is None else two[mute].mute(two[1 - mute])
    mend = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() > mend, PATIENCE, "the cable is put in again")
    assert all(process.poll() is None for process in processes), "the cut came before the end"
    two[1].mend() if mute is None else two[mute].unmute(two[1 - mute])
    go_on(tmp_path)
    ended = [Ended.of(process) for process in processes]
    require(ended, 0, 0)
    assert re.search(r"node 1 \(.*\) reconnected after [0-9.]+ s \(nothing arrived for [0-9.]+ s\)", ended[0].err)
    assert re.search(r"worker \d is connected to worker \d again after", ended[0].err + ended[1].err)
    alone = undisturbed(tmp_path / "alone", job, "all_reduce(ring)", 4, 100, seed=1)
    assert alone == summary(tmp_path / "run")["hashes"]


@pytest.mark.full
def test_the_side_of_the_coordinator_goes_on_and_the_other_side_ends(two: list[Host], tmp_path: Path) -> None:
    """Gossip needs no particular worker; the cable stays out."""
    processes = start_two(two, tmp_path, "-s", "gossip", "--link-timeout", "2")
    two[1].cut()
    away = Ended.of(processes[1])
    assert away.code == 1, away.err
    assert re.search(r"and the link was down for [0-9.]+ s, longer than the link timeout of 2 s", away.err)
    require_idle(two[1:])
    files = [tmp_path / "run" / "events" / f"worker-{rank}.jsonl" for rank in (0, 1)]
    wait_until(lambda: all(file.read_bytes().count(b'"type":"lost"') == 2 for file in files), PATIENCE, "both are lost")
    before = [file.stat().st_size for file in files]
    wait_until(
        lambda: all(file.stat().st_size > size for file, size in zip(files, before, strict=True)),
        PATIENCE,
        "the workers beside the coordinator take further steps",
    )
    processes[0].send_signal(signal.SIGINT)
    Ended.of(processes[0])
    assert summary(tmp_path / "run")["status"] == "interrupted"


@pytest.mark.full
def test_the_backup_of_a_server_is_on_another_host_and_takes_its_place(two: list[Host], tmp_path: Path) -> None:
    """The server of the second half of the model is killed on the second host."""
    arguments = ["train", "softmax", "-n", "4", "--steps", "600", "--seed", "1"]
    kill = ["--import", write_failpoint(tmp_path, Failpoint("server-1", "update.applied", 400))]
    ended = on_all(two, *arguments, "-s", "ps(bsp, shards=2, replicas=1)", *kill, first=["--out", tmp_path / "run"])
    require(ended, 0, 0)
    assert signalled(tmp_path) is not None, "the server was not killed"
    assert "server 1 was killed by SIGKILL; server 3, its backup, continues in its place" in ended[0].err
    alone = RealRun([*arguments, "-s", "ps(bsp, shards=2)"], tmp_path / "alone").end()
    assert alone.summary is not None
    workers = {f"worker {rank}" for rank in range(4)}
    hashes = [{who: one["hashes"][who] for who in workers} for one in (alone.summary, summary(tmp_path / "run"))]
    assert hashes[0] == hashes[1]
    require_idle(two)


@pytest.mark.full
def test_a_host_that_vanishes_with_a_server_and_workers_leaves_the_others_training(
    two: list[Host], tmp_path: Path
) -> None:
    """Server 1 and two workers are on the second host, whose cable is cut; server 3 is the backup of server 1."""
    processes = start_two(two, tmp_path, "-s", "ps(ssp(3), shards=2, replicas=1)", "--link-timeout", "2")
    two[1].cut()
    away = Ended.of(processes[1])
    assert away.code == 1, away.err
    wait_until(lambda: promoted(tmp_path / "run", 3), PATIENCE, "the backup continues, with a push")
    files = [tmp_path / "run" / "events" / f"worker-{rank}.jsonl" for rank in (0, 1)]
    before = [file.stat().st_size for file in files]
    wait_until(
        lambda: all(file.stat().st_size > size for file, size in zip(files, before, strict=True)),
        PATIENCE,
        "the workers beside the coordinator take further steps",
    )
    processes[0].send_signal(signal.SIGINT)
    ended = Ended.of(processes[0])
    assert summary(tmp_path / "run")["status"] == "interrupted"
    assert re.search(r"server 1 was lost with its host.*; server 3, its backup, continues in its place", ended.err)


def promoted(record: Path, index: int) -> bool:
    """Whether a backup has written that it took the place of its server."""
    return b'"type":"promoted"' in (record / "events" / f"server-{index}.jsonl").read_bytes()


@pytest.mark.full
def test_ctrl_c_on_any_host_ends_all(two: list[Host], tmp_path: Path) -> None:
    processes = start_two(two, tmp_path, "-s", "gossip")
    processes[1].send_signal(signal.SIGINT)
    ended = [Ended.of(process) for process in processes]
    assert all(one.code for one in ended)
    assert "on node 1" in ended[0].err
    assert summary(tmp_path / "run")["status"] == "interrupted"
    require_idle(two)


@pytest.mark.full
def test_a_killed_agent_takes_its_workers_along(two: list[Host], tmp_path: Path) -> None:
    processes = start_two(two, tmp_path, "-s", "all_reduce", "--checkpoint-every", "20")
    kept = tmp_path / "run" / "checkpoints"
    wait_until(lambda: any(kept.glob("*/manifest.json")), PATIENCE, "a checkpoint is complete")
    os.kill(processes[1].pid, signal.SIGKILL)
    ended = [Ended.of(process) for process in processes]
    require(ended, 1, -signal.SIGKILL)
    assert re.search("worker [23] was lost with its host .*; flockstep resume .*run continues from step", ended[0].err)
    assert "both processes are alive" not in ended[0].err
    wait_until(lambda: not any(host.processes() for host in two), PATIENCE, "the workers of the host end")
