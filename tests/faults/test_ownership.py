"""A run's folder has one owner, is not replaced unasked, and is noticed when it is lost."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from flockstep.cli.app import run as run_command
from flockstep.records.folder import RunFolder
from support.processes import RealRun

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")

ENDLESS = ["train", "softmax", "-s", "all_reduce", "-n", "2", "--steps", "1000000", "--evaluate-every", "1000000"]
SHORT = ["simulate", "softmax", "-s", "bsp", "-n", "2", "--steps", "3"]


def test_a_folder_in_use_is_refused_and_its_loss_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    run = RealRun(ENDLESS, folder)
    run.wait_for_work()
    before = (folder / "config.toml").read_bytes()
    for options in ([], ["--overwrite"]):
        assert run_command([*SHORT, *options, "--out", str(folder)]) == 2
        assert f"is in use: process {run.main.pid} writes the record of a run there; wait" in capsys.readouterr().err
    assert (folder / "config.toml").read_bytes() == before
    shutil.rmtree(folder, ignore_errors=True)  # a worker may write in between
    ended = run.end()
    assert ended.code == 1
    assert "run was removed or replaced during its run" in ended.err
    assert len(ended.err.splitlines()) == 1
    assert ended.summary is None


def test_a_lost_file_of_events_fails_the_run(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "from pathlib import Path\nfrom flockstep.workloads.softmax import Softmax\n"
        "class Thief(type(Softmax().job(0).model())):\n"
        "    def gradients(self, *arguments):\n"
        "        Path(__file__).with_name('run').joinpath('events/worker-1.jsonl').unlink(missing_ok=True)\n"
        "        return super().gradients(*arguments)\n"
        "def job():\n    job = Softmax().job(0)\n"
        "    def model():\n        made = job.model()\n        made.__class__ = Thief\n        return made\n"
        "    return type(job)(model, job.data, job.optimizer, batch=4)\n"
    )
    ended = RealRun(["train", str(job), "-s", "bsp", "-n", "2", "--steps", "20"], tmp_path / "run").end()
    assert ended.code == 1
    assert "worker-1.jsonl was removed during its run, so the record is incomplete" in ended.err
    assert ended.summary is not None
    assert ended.summary["status"] == "failed"


def test_a_finished_run_is_replaced_on_request_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [*SHORT, "--out", str(tmp_path / "run")]
    assert run_command(command) == 0
    before = (tmp_path / "run" / "summary.json").stat().st_mtime_ns
    capsys.readouterr()
    assert run_command(command) == 2
    assert "holds a finished run; choose another folder with --out, or replace it with --overwrite" in (
        capsys.readouterr().err
    )
    assert (tmp_path / "run" / "summary.json").stat().st_mtime_ns == before
    assert run_command([*command, "--overwrite"]) == 0
    assert (tmp_path / "run" / "summary.json").stat().st_mtime_ns > before


def test_a_comparison_keeps_finished_runs_and_repeats_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compare", "softmax", "--simulate", "-s", "bsp", "-s", "gossip", "-n", "2", "--steps", "3", "--out"]
    out = tmp_path / "c"
    assert run_command([*command, str(out)]) == 0
    (out / "gossip" / "summary.json").unlink()  # as of a run that was killed
    capsys.readouterr()
    assert run_command([*command, str(out)]) == 0
    assert capsys.readouterr().err.count("kept from before") == 2  # and one worker
    assert RunFolder(out / "gossip").read_summary().status == "finished"
    assert run_command([*command, str(out), "--seed", "5"]) == 2
    assert "holds a finished run of another configuration; choose another folder" in capsys.readouterr().err
    assert not (out / ".owner").exists()
