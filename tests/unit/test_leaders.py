"""Two coordinators of a run: only the newest leads, and the workers take no part from another one."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import msgspec
import pytest

from flockstep.drivers.member import NodeSpec
from flockstep.errors import ConfigurationError, RunError
from flockstep.launchers.parking import PARKED, ParkedWorkers, Parking, Part
from flockstep.records import owner
from support.processes import PATIENCE, wait_until


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process leads is forgotten in the end."""
    monkeypatch.setattr(owner, "_leading", {})


def test_of_those_that_begin_at_once_one_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    barrier, newest = Barrier(8), owner.newest_leader

    def all_together(folder: Path) -> int:
        found = newest(folder)
        barrier.wait(PATIENCE)
        return found

    monkeypatch.setattr(owner, "newest_leader", all_together)

    def lead(_: int) -> bool:
        try:
            owner.lead(tmp_path)
        except ConfigurationError as error:
            assert "another process has just begun to coordinate" in str(error)  # noqa: PT017
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sorted(threads.map(lead, range(8))) == [False] * 7 + [True]
    assert newest(tmp_path) == 1


def test_a_coordinator_that_was_stopped_finds_that_another_one_leads(tmp_path: Path) -> None:
    owner.lead(tmp_path)
    owner.check(tmp_path)
    assert owner.is_ours(tmp_path)
    (tmp_path / owner.LEADERS / "2").touch()  # by a process on another host, where the lock is not seen
    with pytest.raises(RunError, match=r"another process now coordinates the run in .*, so this process stops"):
        owner.check(tmp_path)
    assert not owner.is_ours(tmp_path), "it writes no summary"


def test_a_worker_takes_no_part_from_a_coordinator_that_does_not_lead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda *given: None)
    owner.lead(tmp_path)
    owner.lead(tmp_path)
    spec = NodeSpec("run", 1, "", "", "ipc", 5.0, str(tmp_path), 2, 0)
    found: list[Any] = []
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(Parking(PATIENCE).wait, tmp_path, 1, Event())
        file = tmp_path / PARKED / str(os.getpid())
        wait_until(lambda: owner.is_locked(file) and file.read_text(), PATIENCE, "the worker waits")
        for leader in (1, 2):
            one = ParkedWorkers(tmp_path).take(0)
            assert one is not None
            assert (one.pid, one.rank) == (os.getpid(), 1)
            one.begin(Part(spec, f"of {leader}", leader))
            answer = file.with_suffix(".part")
            assert leader == 2 or not (answer.stat().st_mode & 0o077), "others may not read the secret"
            wait_until(lambda answer=answer: not answer.exists(), PATIENCE, "the part was read")
        found.append(waiting.result(PATIENCE))
    assert msgspec.to_builtins(found[0])["config"] == "of 2"
    assert not (tmp_path / PARKED).exists()
