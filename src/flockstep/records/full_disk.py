"""Writes whole files; if the disk is full, writes them to another folder."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from flockstep.errors import ConfigurationError
from flockstep.records.access import make_folder, open_file
from flockstep.records.scratch import private_folder

HALF = ".half"
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of the operating system that mean a full disk. The run continues without the data that could not be
written.
"""
_kept: dict[tuple[Path, Path], Path] = {}
"""(folder, parent of the substitute folder) → substitute folder in which this process stores the folder's files."""


def write_whole(path: Path, data: bytes | Callable[[IO[bytes]], object]) -> None:
    """Write a whole file, or leave the old file in place, so that a reader never sees a partial file."""
    make_folder(path.parent)
    half = path.with_name(path.name + HALF)
    try:
        with open_file(half, "wb") as file:
            file.write(data) if isinstance(data, bytes) else data(file)
    except OSError:
        half.unlink(missing_ok=True)
        raise
    half.replace(path)


def replace(path: Path, data: bytes | Callable[[IO[bytes]], object]) -> None:
    """Write a whole file.

    If the disk is full, write it to the temporary folder or the home folder and print where it is.

    In its original place, a symbolic link is created, for which a full disk has room.

    Raises:
        OSError: the file cannot be written to any of these folders.
    """
    try:
        write_whole(path, data)
    except OSError as error:
        if error.errno not in FULL:
            raise
        for other in (Path(tempfile.gettempdir()), Path.home()):
            try:
                kept = _keep(other, path, data)
            except (OSError, ConfigurationError):
                continue
            with contextlib.suppress(OSError):
                link = path.with_name(path.name + HALF)
                link.symlink_to(kept)
                link.replace(path)
            return say_full(path, error, f"it was written to {kept} instead")
        raise


def _keep(place: Path, path: Path, data: bytes | Callable[[IO[bytes]], object]) -> Path:
    """Write a file to a private folder in `place`, one folder for each record; return the file's path."""
    who = Path(os.path.abspath(path.parent)), place  # noqa: PTH100 - a link in it stays a link
    if who not in _kept or not _kept[who].is_dir():
        _kept[who] = private_folder(place, f"flockstep-kept-{who[0].name}-")
    kept = _kept[who] / path.name
    try:
        write_whole(kept, data)
    except OSError:
        with contextlib.suppress(OSError):  # earlier files are in it
            _kept[who].rmdir()
            del _kept[who]
        raise
    return kept.absolute()


def say_full(path: Path, error: OSError, how: str) -> None:
    """Print to standard error that the full disk could not take a file, and what happens instead."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"flockstep: {path} could not be written: {error.strerror}; {how}\n")
        sys.stderr.flush()
