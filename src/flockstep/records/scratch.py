"""The private folders of a run outside its record, for sockets.

A process removes its own folders, and each run removes those that killed processes have left.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from flockstep import system
from flockstep.errors import ConfigurationError
from flockstep.records.owner import OWNER, owned

PREFIX = "flockstep-"
MARK = ".sockets"
"""Name of an empty file that marks a folder as made by `scratch`; records have owner files, too."""
LONGEST = 50
"""Maximum length of a temporary folder's path in bytes; the path of a socket below it may have at most 104 bytes."""
SHORT = "/tmp"  # noqa: S108 - the folders in it are private, with random names
"""Temporary folder in place of one whose path is longer."""


def private_folder(place: Path, prefix: str = PREFIX) -> Path:
    """Create a folder with a random name in `place` that only this user may enter, and return its path."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))  # mode 0700; a name that exists is never taken
    require_private(folder)
    return folder


def require_private(folder: Path) -> None:
    """Refuse a path that is not a folder of this user, or that other users may enter."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or not system.is_own(found) or system.is_open(found):
        raise ConfigurationError(
            f"{folder} belongs to another user, or other users may enter it; remove it, or set TMPDIR to a folder of "
            "your own"
        )


def place_of_sockets() -> Path:
    """Return the temporary folder or, if its path is too long for sockets, `SHORT`."""
    usual = tempfile.gettempdir()
    return Path(SHORT if len(os.fsencode(usual)) > LONGEST and os.access(SHORT, os.W_OK) else usual)


@contextlib.contextmanager
def scratch(place: Path | None = None) -> Iterator[Path]:
    """Context manager that creates a private folder owned by this process in `place`, by default the temporary folder
    or, if its path is too long for sockets, `SHORT`, and removes the folders there that killed processes have left.
    """
    pid = os.getpid()
    if place is None:
        place = place_of_sockets()
    sweep(place)
    folder = private_folder(place)
    try:
        (folder / MARK).touch()
        with owned(folder):
            yield folder
    finally:
        if os.getpid() == pid:  # a forked child that runs inherited exit handlers comes here too
            shutil.rmtree(folder, ignore_errors=True)


def sweep(place: Path) -> None:
    """Remove the folders in `place` that `scratch` has made for this user and whose owners have died."""
    for folder in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, ConfigurationError):  # another process owns or removes it
            mark, found = folder / MARK, folder.lstat()
            made = stat.S_ISDIR(found.st_mode) and system.is_own(found) and stat.S_ISREG(mark.lstat().st_mode)
            if made and not (folder / "config.toml").exists() and (folder / OWNER).stat().st_size:
                with owned(folder):
                    shutil.rmtree(folder)
