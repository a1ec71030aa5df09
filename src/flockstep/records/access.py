"""Files of a run's record: whole or not at all, and as open to other users as the folder of the record."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from flockstep import system
from flockstep.errors import ConfigurationError
from flockstep.messages import Address, node_name

PRIVATE, SHARED = 0o700, 0o755
HALF = ".half"
"""Suffix of the name under which a file is written until it is whole."""


def set_readers(folder: Path, shared: bool) -> None:
    """Let all users of the host read a new record, or its owner alone; refuse a folder that stays open to others."""
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
    """Open a file, which is as open to other users as its folder, or not at all if it is `private`."""

    def opener(name: str, flags: int) -> int:
        readers = 0 if private else path.parent.stat().st_mode & 0o044
        descriptor = os.open(name, flags, 0o600)
        if flags & os.O_CREAT:
            with contextlib.suppress(PermissionError):  # another user's, in a folder that is open to several users
                system.set_mode(descriptor, 0o600 | readers)
        return descriptor

    return open(path, mode, buffering, opener=opener)


@contextlib.contextmanager
def whole(path: Path, durable: bool = False) -> Iterator[Path]:
    """Context manager in whose body a file is written under the path that it yields; the file then takes the name
    `path`, or is removed if the body raised an error. A `durable` file is complete also after a power cut.
    """
    half = _half_of(path)
    try:
        yield half
        if durable:
            with open_file(half, "ab") as file:  # which also lets the readers of the folder read the file
                os.fsync(file.fileno())
    except BaseException as error:
        half.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # an error of `write` names no file
        raise
    half.replace(path)
    if durable:
        synchronize(path.parent)


def write_whole(path: Path, data: bytes | Callable[[IO[bytes]], object], durable: bool = False) -> None:
    """Write a whole file, or leave the old file in place, so that a reader never sees a partial file; see `whole`."""
    make_folder(path.parent)
    with whole(path, durable) as half, open_file(half, "wb") as file:
        file.write(data) if isinstance(data, bytes) else data(file)


class ArrivingFile:
    """A file whose parts arrive one by one; it has its name once it is whole; `durable` is as for `whole`."""

    def __init__(self, path: Path, durable: bool = False):
        self._path, self._durable = path, durable
        self._file = open_file(_half_of(path), "wb", buffering=0)

    def add(self, part: memoryview) -> None:
        """Append the bytes of the next part to the file."""
        while part:
            part = part[self._file.write(part) :]

    def finish(self) -> None:
        """Complete the file after its last part has arrived."""
        self._file.close()
        with whole(self._path, self._durable):
            pass  # it is under the other name already

    def drop(self) -> None:
        """Close and remove an incomplete file; a complete file stays."""
        self._file.close()
        _half_of(self._path).unlink(missing_ok=True)


def _half_of(path: Path) -> Path:
    return path.with_name(path.name + HALF)


def file_of(node: Address | None) -> str:
    """Return the name, without a suffix, of a node's file in a record; None stands for the launcher."""
    return "launcher" if node is None else node_name(node).replace(" ", "-")


def synchronize(folder: Path) -> None:
    """Write the names in a folder to the disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
