"""Writes whole files; where the disk is full, elsewhere."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

HALF = ".half"
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk that takes no more: the run goes on without what the disk did not take."""
_kept: dict[tuple[Path, Path], Path] = {}
"""Where this process keeps files of a folder: by that folder, and by the place in which the folder of the kept is."""


def write_whole(path: Path, data: bytes | Callable[[IO[bytes]], object]) -> None:
    """Write a whole file or leave the old one: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(path.name + HALF)
    try:
        with half.open("wb") as file:
            file.write(data) if isinstance(data, bytes) else data(file)
    except OSError:
        half.unlink(missing_ok=True)
        raise
    half.replace(path)


def replace(path: Path, data: bytes | Callable[[IO[bytes]], object]) -> None:
    """Write a whole file; where the disk is full, write it to the temporary or the home folder and say where it is.

    A symbolic link, for which a full disk has room, stands for the file in its own place.

    Raises:
        OSError: no place takes it.
    """
    try:
        write_whole(path, data)
    except OSError as error:
        if error.errno not in FULL:
            raise
        for other in (Path(tempfile.gettempdir()), Path.home()):
            try:
                kept = _keep(other, path, data)
            except OSError:
                continue
            with contextlib.suppress(OSError):
                link = path.with_name(path.name + HALF)
                link.symlink_to(kept)
                link.replace(path)
            return say_full(path, error, f"it was written to {kept} instead")
        raise


def _keep(place: Path, path: Path, data: bytes | Callable[[IO[bytes]], object]) -> Path:
    """Write a file into a folder in `place` that nobody else can write to, one for each record; return where it is."""
    who = Path(os.path.abspath(path.parent)), place  # noqa: PTH100 - a link in it stays a link
    if who not in _kept or not _kept[who].is_dir():
        _kept[who] = Path(tempfile.mkdtemp(prefix=f"flockstep-kept-{who[0].name}-", dir=place))
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
    """Say on standard error which file a full disk did not take, and what follows from it."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"flockstep: {path} could not be written: {error.strerror}; {how}\n")
        sys.stderr.flush()
