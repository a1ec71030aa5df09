"""Folders in the temporary folder: gone with their process, or with the next run if the process was killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from flockstep.launchers.scratch import scratch
from flockstep.records.owner import OWNER


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def left_behind(folder: Path, owner: str) -> Path:
    folder.mkdir()
    (folder / OWNER).write_text(owner)
    (folder / "pymp-1").mkdir()
    return folder


def test_a_folder_goes_with_its_process(place: Path) -> None:
    with scratch() as folder:
        assert folder.parent == place
        (folder / "socket").touch()
    assert list(place.iterdir()) == []


def test_the_folder_of_a_killed_process_is_removed_by_the_next_run(place: Path) -> None:
    """Nobody holds the owner's file locked any more."""
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
