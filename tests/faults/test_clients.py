"""Clients on real processes that are late, that die, and that come back: rounds go on without them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flockstep.experiments.replay import Replay
from flockstep.records.events import LostEvent, StepEvent, UpdateEvent
from flockstep.records.folder import RunFolder
from flockstep_lab.chaos.base import Failpoint
from flockstep_lab.chaos.failpoint import signalled, write_failpoint
from support.processes import RealRun

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="names processes as Linux does")

LATE = """
import time
from pathlib import Path
from flockstep.records import failpoints
_seen = 0

def late(point):
    global _seen
    _seen += point == "gradient.computed"
    if point == "gradient.computed" and _seen == 7 and Path("/proc/self/comm").read_text().startswith("worker-1"):
        time.sleep(0.7)

failpoints.hooks.append(late)
"""
"""Component file of a run whose worker 1 stands still for 0.7 seconds once."""


def test_rounds_go_on_without_clients_that_are_late_or_die(tmp_path: Path) -> None:
    kill = write_failpoint(tmp_path, Failpoint("worker-2", "gradient.computed", 23))
    (late := tmp_path / "late.py").write_text(LATE)
    words = ["train", "softmax", "-s", "federated(4, 5, deadline=0.4)", "-n", "4", "--steps", "1200"]
    ended = RealRun([*words, "--replayable", "--import", kill, "--import", str(late)], tmp_path / "run").end()
    assert ended.code == 0, ended.err
    assert signalled(tmp_path) is not None
    record = RunFolder(tmp_path / "run")
    events = record.read_events()
    assert {event.node for event in events if isinstance(event, LostEvent)} == {2}
    used = [event.source for event in events if isinstance(event, UpdateEvent)]
    taken = sum(isinstance(event, StepEvent) and event.rank == 1 for event in events)
    assert used.count(1) < taken // 5, "the late change is dropped"
    assert 1 in used[-6:], "and its client takes part again"
    replay = Replay(tmp_path / "run")
    replay.run()
    assert replay.difference is None
    assert not replay.failures
