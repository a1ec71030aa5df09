"""The secret of a run is in no environment: not of a worker, and not of what a worker starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.processes import RealRun
from support.scripts import NUMPY

LOOK = """
import ctypes, subprocess, time
from pathlib import Path
from flockstep.runtime.node_spec import spec_from_environment

spec = spec_from_environment()
assert len(spec.secret) == 64, "a script has the secret of its run"
environments = {
    "its own": Path("/proc/self/environ").read_text(),
    "a child's": subprocess.run(["env"], capture_output=True, text=True, check=True).stdout,
    "that of a child with all descriptors": subprocess.run(
        ["env"], capture_output=True, text=True, check=True, close_fds=False
    ).stdout,
}
seen = [who for who, text in environments.items() if spec.secret in text]
Path(__file__).with_name(f"seen-{spec.address}").write_text(", ".join(seen))
"""
"""A script that writes down in which environments it sees the secret of its run."""


@pytest.mark.parametrize("torch", [False, True], ids=["started", "forked"])
def test_the_secret_of_a_run_is_in_no_environment_of_a_script(torch: bool, tmp_path: Path) -> None:
    """The launcher starts scripts that import no torch, and forks the others."""
    begin = NUMPY if not torch else "import torch\nimport flockstep\n"
    train = (
        "start(); steps(2)"
        if not torch
        else (
            "model = torch.nn.Linear(2, 2)\n"
            "sgd = torch.optim.SGD(model.parameters(), 0.1)\n"
            "flockstep.distribute(model, sgd, strategy='all_reduce').finish()\n"
        )
    )
    script = tmp_path / "script.py"
    script.write_text(f"{begin}\n{LOOK}\n{train}")
    run = RealRun(["launch", "-n", "2", "--transport", "tcp", str(script)], tmp_path / "run", torch=torch, afresh=True)
    ended = run.end()
    assert ended.code == 0, ended.err
    assert [(tmp_path / f"seen-{rank}").read_text() for rank in range(2)] == ["", ""]


JOB = """
import multiprocessing, os
from pathlib import Path
from flockstep.workloads.softmax import Softmax

def job():
    if multiprocessing.parent_process() is not None:
        seen = "FLOCKSTEP_SECRET" in os.environ or "our own" in Path("/proc/self/environ").read_text()
        Path(__file__).with_name(f"seen-{os.getpid()}").write_text(str(seen))
    return Softmax().job(0)
"""


def test_the_secret_that_a_user_sets_is_not_in_the_environment_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOCKSTEP_SECRET", "a secret of our own")
    (tmp_path / "job.py").write_text(JOB)
    arguments = ["train", str(tmp_path / "job.py"), "-s", "all_reduce", "-n", "2", "--steps", "2"]
    ended = RealRun(arguments, tmp_path / "run", afresh=True).end()
    assert ended.code == 0, ended.err
    assert {file.read_text() for file in tmp_path.glob("seen-*")} == {"False"}
