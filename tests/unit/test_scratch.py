"""Folders in the temporary folder: gone with their process, or with the next run if the process was killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import flockstep.records.scratch as scratch_module
from flockstep.records.owner import OWNER
from flockstep.records.scratch import MARK, scratch
from flockstep.runtime.member import die_with


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(scratch_module, "LONGEST", 200)
    return tmp_path


def left_behind(folder: Path, owner: str) -> Path:
    folder.mkdir()
    (folder / OWNER).write_text(owner)
    (folder / MARK).touch()
    (folder / "pymp-1").mkdir()
    return folder


def test_a_folder_goes_with_its_process(place: Path) -> None:
    with scratch() as folder:
        assert folder.parent == place
        (folder / "socket").touch()
    assert list(place.iterdir()) == []


def test_sockets_are_in_a_short_folder_if_the_temporary_folder_has_a_long_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, short = tmp_path / ("x" * 100), tmp_path / "short"
    long.mkdir()
    short.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    monkeypatch.setattr(scratch_module, "SHORT", str(short))
    with scratch() as folder:
        assert folder.parent == short
        assert folder.stat().st_mode & 0o777 == 0o700


def test_the_folder_of_a_killed_process_is_removed_by_the_next_run(place: Path) -> None:
    """The lock of a killed owner is free."""
    left_behind(place / "flockstep-dead", "1234\n")
    with scratch() as folder:
        assert list(place.iterdir()) == [folder]


def test_no_other_folder_is_removed(place: Path) -> None:
    """Of another run that goes on, of one that is being made, with a kept result, of another program."""
    with scratch() as living:
        kept = [left_behind(place / "flockstep-new", ""), left_behind(place / "pymp-other", "1234\n")]
        (place / "flockstep-kept-run-1").mkdir()
        with scratch():
            assert {*kept, living, place / "flockstep-kept-run-1"} <= set(place.iterdir())


def test_what_a_user_keeps_under_our_prefix_is_not_removed(place: Path) -> None:
    """The record of a killed run has an owner's file too; so may one in a folder that was made for sockets."""
    record, both = place / "flockstep-run", left_behind(place / "flockstep-both", "1234\n")
    record.mkdir()
    (record / OWNER).write_text("1234\n")
    for folder in (record, both):
        (folder / "config.toml").touch()
    (place / "elsewhere").mkdir()
    link = place / "flockstep-link"
    link.symlink_to(left_behind(place / "elsewhere" / "dead", "1234\n"))
    with scratch():
        assert {record, both, link} <= set(place.iterdir())
        assert (link / "pymp-1").exists()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_leaves_the_folder_to_its_maker() -> None:
    """Multiprocessing makes a child forget its parent's exit handlers, which ends what only they held."""
    stack = contextlib.ExitStack()
    folder = stack.enter_context(scratch())
    child = multiprocessing.get_context("fork").Process(target=stack.close)
    child.start()
    child.join()
    assert child.exitcode == 0
    assert sorted(path.name for path in folder.iterdir()) == [OWNER, MARK]
    stack.close()
    assert not folder.exists()


def _wait() -> None:
    threading.Event().wait()


def _of_a_changed_run(pid: int, former: str, folder: str, connection: Connection) -> None:
    die_with(pid, former)
    die_with(pid, folder)
    connection.send_bytes(b"ready")
    _wait()


def test_a_node_of_a_run_that_has_changed_removes_the_last_folder_of_a_killed_supervisor(tmp_path: Path) -> None:
    folder = tmp_path / "sockets"
    folder.mkdir()
    for number in range(3000):  # removing them lasts longer than ending a process
        (folder / str(number)).touch()
    spawned = multiprocessing.get_context("spawn")
    here, there = spawned.Pipe()
    supervisor = spawned.Process(target=_wait)
    supervisor.start()
    node = spawned.Process(target=_of_a_changed_run, args=(supervisor.pid, str(tmp_path / "x"), str(folder), there))
    node.start()
    assert here.recv_bytes() == b"ready"
    supervisor.kill()
    node.join()
    supervisor.join()
    assert not folder.exists()
