"""A script continues after every kind of stop under every schedule of the learning rate, wherever its workers are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flockstep.chaos.base import Failpoint
from flockstep.chaos.failpoint import signalled, write_failpoint
from support.processes import RealRun
from support.torch_scripts import write_scheduled_script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes by their names in /proc")

STEPS = 60


def test_a_script_whose_workers_stopped_at_different_steps_of_a_schedule_is_resumed(tmp_path: Path) -> None:
    """Under `ssp` the fast worker is up to three steps ahead in the checkpoint, and so is its learning rate."""
    kill = write_failpoint(tmp_path, Failpoint("launcher", "checkpoint.complete", 2))
    words = ["launch", "-n", "2", "--checkpoint-every", "15", "--import", kill]
    script = [write_scheduled_script(tmp_path), "ps(ssp(3))", "step", str(STEPS)]
    assert RealRun([*words, *script], tmp_path / "run", torch=True).end().code != 0
    assert signalled(tmp_path) is not None
    (tmp_path / "go").touch()
    ended = RealRun(["resume"], tmp_path / "run", torch=True).end()
    assert ended.code == 0, ended.err
    assert [(tmp_path / f"end-{rank}").read_text() for rank in range(2)] == [f"{0.1 * 0.99**STEPS:.6f}"] * 2
