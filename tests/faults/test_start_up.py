"""Faults before all are ready: deterministic, since one worker does not get ready until it is told."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from flockstep.errors import ConfigurationError
from flockstep.launchers.script import launch
from flockstep.launchers.train import train
from flockstep.records.config import RunConfig
from support.matrix import few
from support.processes import PATIENCE, RealRun, content, wait_until

PREPARING = """
import time
from pathlib import Path

def job():
    Path(__file__).with_name("preparing").touch()
    while True:
        time.sleep(0.01)
"""
JOB = """
import multiprocessing, os, time
from pathlib import Path
from flockstep.workloads.softmax import Softmax

HERE = Path(__file__).parent

def job():
    if multiprocessing.parent_process() is not None:
        try:
            os.close(os.open(HERE / "chosen", os.O_CREAT | os.O_EXCL))
            (HERE / "half").write_text(str(os.getpid()))
            (HERE / "half").rename(HERE / "pid")
            while not (HERE / "go").exists():
                time.sleep(0.01)
        except FileExistsError:
            pass
    return Softmax().job(0)
"""


def starting(folder: Path, strategy: str = "bsp") -> RealRun:
    (folder / "slow.py").write_text(JOB)
    run = RealRun(["train", str(folder / "slow.py"), "-s", strategy, "-n", "3"], folder / "run")
    wait_until((folder / "pid").exists, PATIENCE, "a worker holds the start up")
    run.nodes["the slow one"] = int((folder / "pid").read_text())
    assert content(folder / "run" / "events" / "worker-0.jsonl") == b""
    return run


@pytest.mark.full
def test_the_run_starts_once_all_are_ready(tmp_path: Path) -> None:
    run = starting(tmp_path)
    (tmp_path / "go").touch()
    ended = run.end()
    assert (ended.code, ended.err) == (0, "")


def test_a_worker_killed_before_it_joined(tmp_path: Path) -> None:
    run = starting(tmp_path)
    run.fault(signal.SIGKILL, "the slow one")
    ended = run.end()
    assert ended.code == 1
    assert ended.seconds < ended.limit
    assert re.fullmatch(r"flockstep: worker \d was killed by SIGKILL before the run started\n", ended.err)


@pytest.mark.parametrize("kind", few([signal.SIGTERM, signal.SIGINT], signal.SIGINT))
def test_an_interrupt_before_all_have_joined(kind: signal.Signals, tmp_path: Path) -> None:
    run = starting(tmp_path)
    run.fault(kind, "main" if kind == signal.SIGTERM else "group")
    ended = run.end()
    why = "stopped by SIGTERM" if kind == signal.SIGTERM else "interrupted"
    assert (ended.code, ended.err) == (130, f"flockstep: {why}; no worker had begun to train\n")
    assert ended.seconds < ended.limit
    assert ended.summary is not None
    assert ended.summary["status"] == "interrupted"


def test_an_interrupt_before_anything_was_started(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(PREPARING)
    run = RealRun(["train", str(tmp_path / "slow.py"), "-s", "bsp"], tmp_path / "run")
    wait_until((tmp_path / "preparing").exists, PATIENCE, "the job is being loaded")
    run.fault(signal.SIGINT, "group")
    ended = run.end()
    assert (ended.code, ended.err) == (130, "flockstep: interrupted\n")
    assert not (tmp_path / "run").exists()


def test_a_supervisor_killed_before_the_start_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    run = starting(tmp_path)
    assert len(run.processes()) > 3
    assert list(run.scratch.glob("flockstep-*"))
    run.fault(signal.SIGKILL, "main")
    wait_until(lambda: not run.processes(), PATIENCE, "every process ends with the supervisor")
    run.end()


@pytest.mark.parametrize("start", ["train", "launch"])
def test_few_file_handles_are_refused_before_anything_starts(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (20, 4096))
    (tmp_path / "script.py").touch()
    config = RunConfig(kind="train", job="softmax", strategy="asgd", workers=4)
    begin = train if start == "train" else partial(launch, tmp_path / "script.py", [])
    with pytest.raises(ConfigurationError, match=r"the limit is 20; raise the limit \(ulimit -n \d+\)"):
        begin(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_limit_that_the_refusal_names_is_enough(tmp_path: Path) -> None:
    def limited(handles: int) -> RealRun:
        shell = ["sh", "-c", f'ulimit -n {handles}; exec "$@"', "sh"]
        arguments = ["train", "softmax", "-s", "asgd", "-n", "3", "--steps", "3"]
        return RealRun(arguments, tmp_path / "run", within=shell)

    ended = limited(30).end()
    assert ended.code == 2
    found = re.fullmatch(r"flockstep: .*\(ulimit -n (\d+)\), or use fewer workers\n", ended.err)
    assert found is not None, ended.err
    assert not (tmp_path / "run").exists()
    ended = limited(int(found[1])).end()
    assert ended.code == 0, ended.err


UNGUARDED = """
from pathlib import Path
from flockstep.launchers.train import train
from flockstep.records.config import RunConfig

train(RunConfig(kind="train", job="softmax", strategy="all_reduce", workers=2, steps=1), Path("run"))
"""


def test_an_unguarded_program_is_told_to_guard_its_call(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(UNGUARDED)
    ended = subprocess.run([sys.executable, "mine.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback") == 1
    assert ended.stderr.splitlines()[-1].endswith('put the call under if __name__ == "__main__":')


def test_a_long_temporary_folder_has_room_for_no_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    program = "import sys; from flockstep.cli.app import run; sys.exit(run(sys.argv[1:]))"
    words = [
        "train",
        "softmax",
        "-s",
        "bsp",
        "-n",
        "2",
        "--steps",
        "2",
        "--target",
        "0.01",
        "--out",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
