"""The coordinator of a run is killed: its workers wait for the next one, which takes them back."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path

import pytest

from flockstep.cli.app import run as run_command
from flockstep.launchers.parking import PARKED
from flockstep.records.folder import RunFolder
from flockstep.records.owner import OWNER
from support.jobs import go_on, paced, paced_train
from support.matrix import few
from support.processes import COMMAND, IPC, MEMORY, PATIENCE, RealRun, alive, content, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes by their names in /proc")

STEPS = 120


def begin(folder: Path, strategy: str, seconds: str, *more: str) -> RealRun:
    words = paced_train(folder, strategy, 2, STEPS, slow_after=40)
    run = RealRun([*words, "--checkpoint-every", "10", "--park", seconds, *more], folder / "run")
    run.wait_for_work(25)
    wait_until(lambda: any(run.record.glob("checkpoints/*/manifest.json")), PATIENCE, "a checkpoint is complete")
    return run


def parked(run: RealRun) -> set[int]:
    return {int(file.name) for file in (run.record / PARKED).glob("[0-9]*") if not file.suffix}


def workers(nodes: dict[str, int]) -> set[int]:
    return {pid for name, pid in nodes.items() if name.startswith("worker")}


@pytest.mark.parametrize(
    ("strategy", "transport"),
    few([("all_reduce", MEMORY), ("all_reduce", IPC), ("ps(bsp)", IPC), ("gossip(0.5)", IPC)], ("ps(bsp)", IPC)),
)
def test_a_run_whose_coordinator_was_killed_is_resumed_with_the_same_processes(
    strategy: str, transport: tuple[str, str], tmp_path: Path
) -> None:
    run = begin(tmp_path, strategy, "600", *transport)
    run.fault(signal.SIGKILL, "main")
    wait_until(lambda: parked(run) == workers(run.nodes), PATIENCE, "both workers wait")
    again = RealRun(["resume"], run.record)
    wait_until(lambda: min(again.steps(0), again.steps(1)) > 2 or not again.going(), PATIENCE, "the run continues")
    assert again.going(), again.err
    assert workers(run.nodes) <= run.processes(), "the workers are those of the run before"
    assert workers(again.working()) == set(), "no worker was started"
    go_on(tmp_path)
    ended = again.end()
    assert ended.code == 0, ended.err
    wait_until(lambda: not run.processes(), PATIENCE, "nobody is left")
    record = RunFolder(run.record)
    assert record.read_summary().status == "finished"
    assert record.read_summary().notes[0].startswith("resumed from step ")
    assert not (run.record / PARKED).exists()


def test_workers_for_which_nobody_comes_end(tmp_path: Path) -> None:
    run = begin(tmp_path, "all_reduce", "0.3")
    run.fault(signal.SIGKILL, "main")
    wait_until(lambda: not any(map(alive, run.nodes.values())), PATIENCE, "nobody waits any more")
    assert parked(run) == set()


LOOP = """
while {command}; code=$?; [ $code -gt 130 ]; do
    sleep 0.1
done
exit $code
"""


@pytest.mark.parametrize("kills", few([1, 2], 1))
def test_a_loop_of_the_shell_starts_a_killed_command_again(kills: int, tmp_path: Path) -> None:
    """The command is killed so often; the loop ends when it has succeeded. The workers are those of the first run."""
    words = [*paced_train(tmp_path, "all_reduce", 2, STEPS, slow_after=40), "--checkpoint-every", "10"]
    record = tmp_path / "run"
    command = shlex.join([*COMMAND, *words, *IPC, "--park", "600", "--out", str(record), "--resume"])
    loop = RealRun(words, record, within=["sh", "-c", LOOP.format(command=command)])
    loop.wait_for_work(25)
    before, killed = workers(loop.nodes), set[int]()
    for least in (25, 45)[:kills]:
        wait_until(lambda least=least: min(loop.steps(0), loop.steps(1)) >= least, PATIENCE, f"{least} steps")  # type: ignore[misc]
        wait_until(lambda: any(record.glob("checkpoints/*/manifest.json")), PATIENCE, "a checkpoint is complete")
        (pid,) = [pid for pid in loop.processes() if owner_of(record) == pid and pid not in killed]
        killed.add(pid)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: owner_of(record) not in (*killed, 0), PATIENCE, "another command owns the folder")
        wait_until(
            lambda: before <= workers(loop.working()) | parked(loop), PATIENCE, "the workers are those of before"
        )
    go_on(tmp_path)
    ended = loop.end()
    assert ended.code == 0, ended.err
    notes = RunFolder(record).read_summary().notes
    assert notes[0].startswith("resumed from step "), notes


def owner_of(record: Path) -> int:
    return int(content(record / OWNER).strip() or 0)


def test_a_command_with_resume_begins_its_run_once_and_refuses_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "run")]
    words = ["train", "softmax", "-s", "all_reduce", "-n", "1", "--steps", "40", *IPC, "--resume"]
    assert run_command(words) == 2
    assert "--resume needs the folder of the run; add --out" in capsys.readouterr().err
    assert run_command([*words, *out]) == 0
    assert run_command([*words, *out, "--lr", "0.125"]) == 2
    assert (
        "holds another run: its lr is 1.0, and this command's is 0.125; repeat the command" in capsys.readouterr().err
    )
    assert run_command([*words, *out]) == 2
    assert "holds a run that has ended" in capsys.readouterr().err
    (tmp_path / "run" / "summary.json").unlink()
    assert run_command([*words, *out]) == 0
    assert "holds no complete checkpoint, so the run starts from the beginning" in capsys.readouterr().err


def test_waiting_needs_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "softmax", "-s", "all_reduce", "-n", "2", "--park", "60", "--out", str(tmp_path / "run")]
    assert run_command(words) == 2
    assert "park needs checkpoints, from which flockstep resume continues; add for example" in capsys.readouterr().err
    assert run_command([*words[:-4], "--park", "0", *words[-2:]]) == 2
    assert "park must be > 0 s and finite, got 0; leave it out for no waiting" in capsys.readouterr().err


HANGS = """
import signal

paced_job = job

def job():
    job = paced_job()

    def model():
        model = job.model()
        gradients = model.gradients

        def hang(*arguments):
            if GO.with_name("hang").exists():
                signal.signal(signal.SIGUSR2, signal.SIG_IGN)
                GO.with_name("hung").touch()
                time.sleep(10_000)
            return gradients(*arguments)

        model.gradients = hang
        return model

    return dataclasses.replace(job, model=model)
"""


@pytest.mark.full
def test_a_worker_that_cannot_be_interrupted_ends_when_its_time_is_over(tmp_path: Path) -> None:
    job = Path(paced(tmp_path))
    job.write_text(job.read_text() + HANGS)
    words = ["train", str(job), "-s", "asgd", "-n", "2", "--steps", "100000", "--checkpoint-every", "1000"]
    run = RealRun([*words, "--park", "0.3"], tmp_path / "run")
    run.wait_for_work(5)
    (tmp_path / "hang").touch()
    wait_until((tmp_path / "hung").exists, PATIENCE, "a worker hangs")
    run.fault(signal.SIGKILL, "main")
    wait_until(lambda: not any(map(alive, run.nodes.values())), PATIENCE, "nobody is left")
    assert not (run.record / PARKED).exists(), "the worker had no time to wait there"
