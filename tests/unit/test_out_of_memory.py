"""A process that the kernel killed for want of memory is said to be."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flockstep.launchers import out_of_memory
from flockstep.launchers.out_of_memory import OutOfMemoryDetector, oom_kills
from flockstep.launchers.peers import RunPeers
from flockstep.records.snapshots import LAST
from flockstep.runtime.reports import SnapshotSender


class Ended:
    """A process that has ended."""

    pid = 1
    reason = None

    def __init__(self, code: int):
        self.code = code

    def exit_code(self) -> int:
        return self.code

    def kill(self) -> None:
        """Do nothing: the process has ended."""


def how(code: int, counts: list[int], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("flockstep.launchers.peers.SETTLING", 0.0)
    peers = RunPeers(1, 5.0, memory=OutOfMemoryDetector(lambda: counts.pop(0)))
    peers[0].child = Ended(code)
    told = peers.how_lost(0)
    assert told is not None
    return told


def test_sigkill_and_a_risen_counter_are_said_to_be_want_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    said = how(-signal.SIGKILL, [3, 4], monkeypatch)
    assert said.startswith("worker 0 was killed by SIGKILL, probably by the kernel for lack of memory")


@pytest.mark.parametrize(("code", "after"), [(-signal.SIGKILL, 3), (-signal.SIGSEGV, 4), (1, 4)])
def test_nothing_else_is(code: int, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "lack of memory" not in how(code, [3, after], monkeypatch)


def test_the_counter_is_read_from_the_host_and_the_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vmstat").write_text("nr_free_pages 9\noom_kill 2\n")
    (tmp_path / "cgroup").write_text("1:name=systemd:/x\n0::/run.scope\n")
    (tmp_path / "run.scope").mkdir()
    (tmp_path / "run.scope" / "memory.events").write_text("low 0\noom 7\noom_kill 3\n")
    for name, path in (("VMSTAT", "vmstat"), ("CGROUP", "cgroup"), ("EVENTS", "")):
        monkeypatch.setattr(out_of_memory, name, tmp_path / path)
    assert oom_kills() == 5
    (tmp_path / "cgroup").unlink()
    assert oom_kills() == 2


def test_a_process_without_memory_still_reports_its_failure() -> None:
    """Its newest parameters are lost, but the supervisor hears the reason, which is sent after them."""

    class NoMemory:
        def send_in_parts(self, *_: object) -> None:
            raise MemoryError("no room")

    node: Any = SimpleNamespace(params=np.zeros(3), run_step=1)
    member: Any = NoMemory()
    SnapshotSender(member).salvage(node, 0.0, 0)
    with pytest.raises(MemoryError, match="no room"):
        SnapshotSender(member).send_snapshot(node, LAST, 0.0, 0)
