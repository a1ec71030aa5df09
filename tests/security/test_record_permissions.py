"""Who may read a record, and who may hold it: its owner alone, or all users if the record is shared."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import flockstep
from flockstep.errors import ConfigurationError
from flockstep.records import RunConfig, RunFolder
from flockstep.records.owner import OWNER, in_use, owned
from support.processes import RealRun
from support.users import by_another_user, common_folder, needs_root

CONFIG = RunConfig(kind="train", job="digits", strategy="bsp", workers=4, seed=1)
HELD = re.compile(r"\.owner|leaders/")
"""Files that only the process that writes the record needs."""


@pytest.fixture
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(place: Path) -> set[str]:
    """The modes of a folder and of everything in it, such as `d 700`."""
    return {
        f"{'d' if stat.S_ISDIR(one.stat().st_mode) else 'f'} {one.stat().st_mode & 0o777:o}"
        for one in [place, *place.rglob("*")]
        if not HELD.search(str(one))
    }


@pytest.mark.usefixtures("usual_umask")
@pytest.mark.parametrize(("options", "allowed"), [((), {"d 700", "f 600"}), (("--shared",), {"d 755", "f 644"})])
def test_a_record_is_its_owners_unless_it_is_shared(
    options: tuple[str, ...], allowed: set[str], tmp_path: Path
) -> None:
    """A run on real processes with checkpoints, in a folder of the user's own that was open."""
    (tmp_path / "run").mkdir(mode=0o755)
    words = ["train", "softmax", "-s", "bsp", "-n", "2", "--steps", "600", "--checkpoint-every", "100", *options]
    ended = RealRun(words, tmp_path / "run").end()
    assert ended.code == 0, ended.err
    assert (tmp_path / "run" / "checkpoints").is_dir()
    assert modes(tmp_path / "run") == allowed
    assert RunFolder(tmp_path / "run").read_config().shared == (True if options else None)


@pytest.mark.usefixtures("usual_umask")
@pytest.mark.parametrize("shared", [False, True])
def test_a_comparison_is_its_owners_unless_it_is_shared(shared: bool, tmp_path: Path) -> None:
    """Its report shows the arguments of its runs, too. With the mask of a careful user, shared means shared."""
    os.umask(0o077 if shared else 0o022)
    flockstep.compare("softmax", ["bsp", "asgd"], workers=2, steps=3, simulated=True, out=tmp_path / "c", shared=shared)
    assert modes(tmp_path / "c") == ({"d 755", "f 644"} if shared else {"d 700", "f 600"})


@needs_root
@pytest.mark.parametrize("shared", [None, True])
def test_another_user_cannot_hold_the_lock_of_a_record(shared: bool | None) -> None:
    """The other user would block a resume by holding the lock that the record's owner takes."""
    with common_folder() as place:
        folder = RunFolder(place / "run")
        with folder.created(replace(CONFIG, shared=shared)):
            pass
        (folder.path / OWNER).touch(0o644)  # of a run of an older version that was killed
        with owned(folder.path):
            assert by_another_user('exec 9<"$1"', folder.path / OWNER).returncode != 0
            assert (folder.path / OWNER).stat().st_mode & 0o777 == 0o600


@needs_root
def test_another_user_reads_a_shared_record_while_it_is_written() -> None:
    """Whether the run still goes on shows only by the file of its owner."""
    with common_folder() as place:
        folder = RunFolder(place / "run")
        with folder.created(replace(CONFIG, shared=True)):
            before = os.geteuid()
            os.seteuid(65534)
            try:
                assert folder.read_config().job == "digits"
                assert in_use(folder.path)
            finally:
                os.seteuid(before)
        assert not in_use(folder.path)


@needs_root
def test_a_record_that_cannot_be_closed_to_other_users_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with common_folder() as place:
        (place / "run").mkdir(mode=0o755)
        monkeypatch.setattr(Path, "chmod", lambda self, mode: None)  # a file system without modes
        with pytest.raises(ConfigurationError, match=r"run cannot be closed to other users, its mode stays 755"):
            with RunFolder(place / "run").created(CONFIG):
                pass
        with RunFolder(place / "run").created(replace(CONFIG, shared=True)):
            pass
