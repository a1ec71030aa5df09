"""A real run whose record lies on a disk that gets full: it goes on, and its result is kept elsewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from flockstep.cli.app import run as run_command
from flockstep.records.folder import RunFolder
from support.disks import small_disk
from support.matrix import few
from support.processes import RealRun

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")

SCRIPT = """
import torch
import flockstep

model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), "all_reduce")
for step in range(2000):
    optimizer.zero_grad()
    (-model.weight.sum()).backward()
    optimizer.step()
optimizer.finish()
"""


@pytest.mark.parametrize("command", few(["train", "launch"], "train"))
def test_a_run_on_a_small_disk_goes_on_and_says_where_its_result_is(command: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    what = ["softmax", "-s", "all_reduce", "--steps", "2000"] if command == "train" else [str(tmp_path / "script.py")]
    with small_disk(tmp_path / "small") as disk:
        run = RealRun([command, "-n", "2", *what], disk / "run", torch=command == "launch")
        ended = run.end()
        assert ended.code == 0, ended.err
        record = RunFolder(disk / "run")
        kept = [file for file in (record.result_file, record.summary_file) if file.is_symlink()]
        assert record.result_file in kept, "a summary may be small enough for what the events left"
        for file in kept:
            said = re.search(
                rf"flockstep: {file} could not be written: .*; it was written to (.*) instead\n", ended.err
            )
            assert said is not None, ended.err
            assert file.resolve() == Path(said[1])
        assert "later events are missing from the record" in ended.err
        summary = record.read_summary()
        assert (summary.status, summary.error) == ("finished", None)
        params = record.read_result()[0]
        assert params == 2000 if command == "launch" else np.isfinite(params).all()
        assert run_command(["report", str(record.path), "--out", str(tmp_path / "report.html")]) == 0
        assert "without a summary" not in (tmp_path / "report.html").read_text()
        if record.summary_file in kept:
            record.summary_file.resolve().unlink()
            assert f"it was stored in {record.summary_file.readlink()}" in str(record.read_summary().error)
