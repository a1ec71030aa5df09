"""The command that coordinates a run is killed, and whatever started the command starts the command again."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from pathlib import Path

import pytest

from flockstep.cli.app import run as run_command
from flockstep.records.folder import RunFolder
from flockstep.records.owner import OWNER
from support.jobs import go_on, paced_train
from support.matrix import few
from support.processes import COMMAND, IPC, PATIENCE, RealRun, content, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes by their names in /proc")

STEPS = 120


LOOP = """
while {command}; code=$?; [ $code -gt 130 ]; do
    sleep 0.1
done
exit $code
"""


@pytest.mark.parametrize("kills", few([1, 2], 1))
def test_a_loop_of_the_shell_starts_a_killed_command_again(kills: int, tmp_path: Path) -> None:
    """The command is killed so often; the loop ends when it has succeeded."""
    words = [*paced_train(tmp_path, "all_reduce", 2, STEPS, slow_after=40), "--checkpoint-every", "10"]
    record = tmp_path / "run"
    command = shlex.join([*COMMAND, *words, *IPC, "--out", str(record), "--resume"])
    loop = RealRun(words, record, within=["sh", "-c", LOOP.format(command=command)])
    loop.wait_for_work(25)
    killed = set[int]()
    for least in (25, 45)[:kills]:
        wait_until(lambda least=least: min(loop.steps(0), loop.steps(1)) >= least, PATIENCE, f"{least} steps")  # type: ignore[misc]
        wait_until(lambda: any(record.glob("checkpoints/*/manifest.json")), PATIENCE, "a checkpoint is complete")
        (pid,) = [pid for pid in loop.processes() if owner_of(record) == pid and pid not in killed]
        killed.add(pid)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: owner_of(record) not in (*killed, 0), PATIENCE, "another command owns the folder")
    go_on(tmp_path)
    for folder in loop.scratch.glob("pymp-*"):
        shutil.rmtree(folder)  # multiprocessing's folders of the killed commands
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
