"""Files of a run's record: whole or not at all, and as open to other users as the folder of the record."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from flockstep import system
from flockstep.errors import ConfigurationError

PRIVATE, SHARED = 0o700, 0o755
HALF = ".half"
"""Suffix of the name under which a file is written until it is whole."""


def set_readers(folder: Path, shared: bool) -> None:
    """Let all users of the host read a record whose folder was just created, or its owner alone.

    Raises:
        ConfigurationError: the file system, or the folder's owner, lets other users into a record that is not shared.
    """
    with contextlib.suppress(OSError):
        folder.chmod(SHARED if shared else PRIVATE)
    found = folder.stat()
    if not shared and system.is_open(found):
        raise ConfigurationError(
            f"{folder} cannot be closed to other users, its mode stays "
            f"{found.st_mode & 0o777:o}; choose another folder with --out, or let all users read the record with "
            "--shared"
        )


def make_folder(folder: Path) -> None:
    """Create a folder, unless it exists, and its missing parents; each is as open as the folder that holds it."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with contextlib.suppress(FileExistsError):  # another process has just created it
        folder.mkdir(PRIVATE)
        folder.chmod(folder.parent.stat().st_mode & SHARED | PRIVATE)


def open_file(path: Path, mode: str, buffering: int = -1, private: bool = False) -> IO[Any]:
    """Open a file, as `open` does. The file is as open to other users as the folder that holds it, or not at all if it
    is `private`.
    """

    def opener(name: str, flags: int) -> int:
        readers = 0 if private else path.parent.stat().st_mode & 0o044
        descriptor = os.open(name, flags, 0o600)
        if flags & os.O_CREAT:
            with contextlib.suppress(PermissionError):  # another user's, in a folder that is open to several users
                system.set_mode(descriptor, 0o600 | readers)
        return descriptor

    return open(path, mode, buffering, opener=opener)


def write_whole(path: Path, data: bytes | Callable[[IO[bytes]], object]) -> None:
    """Write a whole file, or leave the old file in place, so that a reader never sees a partial file.

    Raises:
        OSError: the disk is full, or does not accept the file, whose path the error names.
    """
    make_folder(path.parent)
    half = path.with_name(path.name + HALF)
    try:
        with open_file(half, "wb") as file:
            file.write(data) if isinstance(data, bytes) else data(file)
    except OSError as error:
        half.unlink(missing_ok=True)
        error.filename = str(path)  # an error of `write` names no file
        raise
    half.replace(path)
