"""A run over several hosts, each a network namespace, that is killed and resumed ends as one that was not killed."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flockstep.launchers.simulate import simulate
from flockstep.records import checkpoints as disk
from flockstep.records.config import RunConfig
from flockstep.records.events import StepEvent
from flockstep.records.folder import RunFolder
from flockstep_lab.chaos.base import Failpoint
from flockstep_lab.chaos.failpoint import signalled, write_failpoint
from support.hosts import PORT, Ended, Host, network, on_all
from support.jobs import go_on, paced
from support.matrix import few
from support.processes import PATIENCE, content, wait_until
from support.torch_scripts import write_script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs network namespaces")

STEPS = 120


@pytest.fixture
def two() -> Iterator[list[Host]]:
    with network(2) as hosts:
        yield hosts


def resumed(two: list[Host], run: Path, *arguments: str | Path) -> list[Ended]:
    """Resume the run on the first host; the second host repeats the command of the run."""
    where = ["--nodes", "2", "--coordinator", f"{two[0].address}:{PORT}"]
    command, *rest = arguments
    other = two[1].start(command, *where, "--node-rank", "1", *rest)
    first = two[0].start("resume", run, *where, "--node-rank", "0")
    return [Ended.of(first), Ended.of(other)]


def check_steps(record: RunFolder) -> None:
    """Every step of every worker is in the record once, in order."""
    for rank in range(2):
        steps = [event.step for event in record.read_events() if isinstance(event, StepEvent) and event.rank == rank]
        assert steps == list(range(1, STEPS + 1))


@pytest.mark.parametrize(
    ("strategy", "who", "point", "number"),
    few(
        [
            ("all_reduce", "worker-1", "gradient.computed", 70),
            ("all_reduce", "launcher", "shard.written", 4),
            ("all_reduce", "launcher", "manifest.begun", 2),
            ("ps(bsp, shards=2)", "worker-1", "shard.written", 2),
            ("ps(bsp, shards=2, replicas=1)", "launcher", "manifest.renamed", 2),
        ],
        ("ps(bsp, shards=2)", "worker-1", "shard.written", 2),
    ),
)
def test_a_run_over_two_hosts_killed_at_a_point_and_resumed_ends_with_the_bits_of_one_that_was_not(
    strategy: str, who: str, point: str, number: int, two: list[Host], tmp_path: Path
) -> None:
    """Worker 1 and server 1 are on the second host, whose states travel to the coordinator and back."""
    words = ["train", paced(tmp_path), "-s", strategy, "-n", "2", "--steps", str(STEPS), "--evaluate-every", "30"]
    words += ["--checkpoint-every", "20", "--import", write_failpoint(tmp_path, Failpoint(who, point, number))]
    ended = on_all(two, *words, first=["--out", tmp_path / "run"])
    assert all(one.code for one in ended)
    assert signalled(tmp_path) is not None, ended
    step = min(disk.newest(tmp_path / "run").manifest.steps.values())
    go_on(tmp_path)
    again = resumed(two, tmp_path / "run", *words)
    assert [one.code for one in again] == [0, 0], again
    record = RunFolder(tmp_path / "run")
    assert record.read_summary().notes[0].startswith(f"resumed from step {step}; ")
    check_steps(record)
    config = RunConfig(
        kind="simulate", job=words[1], strategy=strategy, workers=2, steps=STEPS, evaluate_every=30, threads=1
    )
    simulate(config, tmp_path / "virtual", lambda done, every, t: None, False)
    assert record.read_result()[0].tobytes() == RunFolder(tmp_path / "virtual").read_result()[0].tobytes()
    wait_until(lambda: not any(host.processes() for host in two), PATIENCE, "no process is left")


@pytest.mark.parametrize("whom", few([0, 1], 1))
def test_sigterm_on_any_host_ends_a_run_with_a_checkpoint(whom: int, two: list[Host], tmp_path: Path) -> None:
    where = ["--nodes", "2", "--coordinator", f"{two[0].address}:{PORT}"]
    words = ["train", paced(tmp_path), "-s", "all_reduce", "-n", "2", "--steps", "100000", *where]
    other = two[1].start(*words, "--node-rank", "1")
    first = two[0].start(*words, "--node-rank", "0", "--out", tmp_path / "run")
    events = tmp_path / "run" / "events" / "worker-1.jsonl"
    wait_until(lambda: b'"step"' in content(events) or first.poll() is not None, PATIENCE, "a step")
    assert first.poll() is None, Ended.of(first)
    (first, other)[whom].send_signal(signal.SIGTERM)
    ended = [Ended.of(first), Ended.of(other)]
    assert ended[0].code == 130, ended
    assert ended[1].code, ended
    step = min(disk.newest(tmp_path / "run").manifest.steps.values())
    assert f"continues from step {step}\n" in ended[0].err
    assert ("on node 1" in ended[0].err) == (whom == 1)


@pytest.mark.full
@pytest.mark.parametrize("module", [False, True])
def test_a_script_on_two_hosts_is_killed_and_resumed(
    module: bool, two: list[Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = []
    for kill in (True, False):
        folder = tmp_path / f"kill-{kill}"
        folder.mkdir()
        words = ["launch", "-n", "2", "--checkpoint-every", "20"]
        if kill:
            words += ["--import", write_failpoint(folder, Failpoint("worker-1", "gradient.computed", 70))]
        else:
            (folder / "go").touch()
        monkeypatch.chdir(folder)
        script = write_script(folder)
        words += [*(["-m", "script"] if module else [script]), "all_reduce", "12"]
        ended = on_all(two, *words, first=["--out", folder / "run"])
        if kill:
            assert all(one.code for one in ended)
            assert signalled(folder) is not None, ended
            (folder / "go").touch()
            ended = resumed(two, folder / "run", *words)
        assert [one.code for one in ended] == [0, 0], ended
        check_steps(RunFolder(folder / "run"))
        ends.append([torch.load(folder / f"end-{rank}") for rank in range(2)])
    assert all(all(map(torch.equal, ours, theirs)) for ours, theirs in zip(*ends, strict=True))


def test_a_host_with_another_job_cannot_take_part_in_the_resumed_run(two: list[Host], tmp_path: Path) -> None:
    words = ["train", paced(tmp_path), "-s", "all_reduce", "-n", "2", "--steps", str(STEPS), "--checkpoint-every", "20"]
    words += ["--import", write_failpoint(tmp_path, Failpoint("launcher", "checkpoint.complete", 1))]
    assert all(one.code for one in on_all(two, *words, first=["--out", tmp_path / "run"]))
    (tmp_path / "other").mkdir()
    other = Path(paced(tmp_path / "other"))
    other.write_text(other.read_text() + "\n")
    words[1] = str(other)
    where = ["--nodes", "2", "--coordinator", f"{two[0].address}:{PORT}"]
    refused = two[1].start(words[0], *where, "--node-rank", "1", *words[1:])
    first = two[0].start("resume", tmp_path / "run", *where, "--node-rank", "0", "--timeout", "20")
    assert "job is paced.py (SHA-256" in Ended.of(refused).err
    assert Ended.of(first).code == 2
    elsewhere = two[1].start("resume", tmp_path / "run", *where, "--node-rank", "1")
    assert "flockstep resume runs on the host with --node-rank 0, got 1; on the other hosts" in Ended.of(elsewhere).err
