"""Folders of a run outside its record: another user of the machine can neither enter nor prepare them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flockstep.errors import ConfigurationError
from flockstep.records.scratch import private_folder, require_private, scratch
from flockstep.runtime.adoption import _listening as listening
from support.users import by_another_user, common_folder, needs_root

pytestmark = needs_root


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with common_folder() as place:
        monkeypatch.setattr("tempfile.tempdir", str(place))
        yield place


MAKERS: dict[str, Callable[[contextlib.ExitStack, Path], Path]] = {
    "sockets": lambda stack, place: stack.enter_context(scratch()),
    "rendezvous": lambda stack, place: (
        Path(stack.enter_context(listening(place / "flockstep-0123")).getsockname()).parent
    ),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_another_user_cannot_enter_a_folder_of_a_run(
    make: Callable[[contextlib.ExitStack, Path], Path], common: Path
) -> None:
    with contextlib.ExitStack() as stack:
        before = os.umask(0)  # the most open setting that a user may have
        stack.callback(os.umask, before)
        folder = make(stack, common)
        assert folder.parent == common
        require_private(folder)
        assert by_another_user('ls "$1"', folder).returncode != 0
        assert by_another_user('touch "$1/x"', folder).returncode != 0


def test_a_name_that_another_user_has_taken_is_not_used(common: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other user guesses the first names, and puts a folder and a link there."""
    names = iter(["guessed", "linked", "free"])
    monkeypatch.setattr("tempfile._get_candidate_names", lambda: names)
    done = by_another_user(
        'mkdir -m 777 "$1/flockstep-guessed" "$1/elsewhere" && ln -s "$1/elsewhere" "$1/flockstep-linked"', common
    )
    assert done.returncode == 0
    assert private_folder(common) == common / "flockstep-free"


@pytest.mark.parametrize(
    "plant",
    ['mkdir -m 700 "$1"', 'mkdir -m 777 "$1"', 'mkdir -m 777 "$1-x"; ln -s "$1-x" "$1"', 'ln -s /root "$1"'],
    ids=["a folder", "an open folder", "a link", "a link to our folder"],
)
def test_a_rendezvous_that_another_user_has_prepared_is_refused(plant: str, common: Path) -> None:
    """The processes of one host find each other by a name that others can compute."""
    folder = common / "flockstep-0123"
    assert by_another_user(plant, folder).returncode == 0
    with pytest.raises(ConfigurationError, match=r"flockstep-0123 belongs to another user, or other users may enter"):
        listening(folder)


def test_a_file_system_without_permissions_is_refused(common: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folders have the modes that they were mounted with, whatever mkdir asks for."""
    make = os.mkdir

    def mkdir(path: str, mode: int = 0o777, **options: int) -> None:
        make(path, mode, **options)
        Path(path).chmod(0o777)

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(ConfigurationError, match="other users may enter it"):
        private_folder(common)
