"""An interrupted or failed run keeps the newest common model: its result is that model, not the initial one."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from flockstep.arrays.schema import FlatArray
from flockstep.cli.app import run as run_command
from flockstep.records.events import ResultEvent
from flockstep.records.folder import RunFolder
from flockstep.runtime.setup import prepare
from support.matrix import few
from support.processes import Ended, RealRun
from support.scripts import NUMPY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")

ENDLESS = ["-n", "3", "--steps", "1000000"]


def after(steps: int, strategy: str, folder: Path) -> FlatArray:
    """The oracle: the result of a run of that many steps from the same seed, in virtual time."""
    options = ["-n", "3", "--steps", str(steps), "--out", str(folder / f"oracle-{steps}")]
    assert run_command(["simulate", "softmax", "-s", strategy, *options]) == 0
    return RunFolder(folder / f"oracle-{steps}").read_result()[0]


def result(folder: Path) -> tuple[FlatArray, ResultEvent]:
    told = [event for event in RunFolder(folder).read_events() if isinstance(event, ResultEvent)]
    assert len(told) == 1
    return RunFolder(folder).read_result()[0], told[0]


def initial(record: Path) -> FlatArray:
    return prepare(RunFolder(record).read_config())[0].initial()


def check(ended: Ended, folder: Path, strategy: str) -> None:
    """The result is the model after as many steps as the summary says: the step that was going on may be missing."""
    assert ended.summary is not None
    params, told = result(folder / "run")
    assert (told.step, told.seconds) == (ended.summary["result_step"], ended.summary["result_seconds"])
    steps = int(told.step)
    assert steps > 40
    assert not (folder / "run" / "snapshots").exists()
    assert not np.allclose(params, initial(folder / "run"))
    near = [float(np.abs(params - after(n, strategy, folder)).max()) for n in range(steps - 1, steps + 2)]
    assert min(near) < 1e-5, near


@pytest.mark.parametrize("fault", few(["interrupt", "kill"], "kill"))
def test_the_newest_model_is_the_result(fault: str, tmp_path: Path) -> None:
    run = RealRun(["train", "softmax", "-s", "all_reduce", *ENDLESS], tmp_path / "run")
    run.wait_for_work()
    run.fault(*((signal.SIGINT, "main") if fault == "interrupt" else (signal.SIGKILL, "worker-1")))
    ended = run.end()
    assert ended.code == (130 if fault == "interrupt" else 1)
    check(ended, tmp_path, "all_reduce")


SCRIPT = """
start("all_reduce", {"w": (1,)})
for step in range(1_000_000):
    if sys.argv[1] == "fail" and rank == 1 and step == 60:
        raise ValueError("no more")
    optimizer.gradients[:] = -10
    optimizer.step()
"""


@pytest.mark.parametrize("fault", few(["interrupt", "fail"], "fail"))
def test_the_newest_model_of_a_launched_script_is_the_result(fault: str, tmp_path: Path) -> None:
    """The model's only weight counts the steps, so that its value shows which model was kept."""
    (tmp_path / "script.py").write_text(NUMPY + SCRIPT)
    run = RealRun(["launch", "-n", "2", str(tmp_path / "script.py"), fault], tmp_path / "run")
    if fault == "interrupt":
        run.wait_for_work()
        run.fault(signal.SIGINT, "main")
    ended = run.end()
    assert ended.code == (130 if fault == "interrupt" else 1)
    assert ended.summary is not None
    assert ended.summary["status"] == ("interrupted" if fault == "interrupt" else "failed")
    params, told = result(tmp_path / "run")
    assert params[0] > 40
    assert abs(params[0] - told.step) <= 1
    assert fault == "interrupt" or params[0] == 60
