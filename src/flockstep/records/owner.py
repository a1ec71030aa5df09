"""Gives a folder one owner at a time: the process that holds a lock on a file in the folder and writes the record."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from flockstep import system
from flockstep.errors import ConfigurationError, RunError
from flockstep.records.access import PRIVATE, open_file

OWNER = ".owner"
"""Name of the file that the owner of a folder holds locked; the file contains the owner's process id."""
_held: dict[Path, IO[str]] = {}


@contextlib.contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Context manager that owns a folder, which is created if it is missing; refuse a folder that another run owns."""
    pid, folder = os.getpid(), _place(folder)
    folder.mkdir(PRIVATE, parents=True, exist_ok=True)
    _held[folder] = file = _lock(folder)
    try:
        yield
    finally:
        del _held[folder]
        if os.getpid() == pid and _is_at(folder, file):
            (folder / OWNER).unlink()
        file.close()


def check(folder: Path) -> None:
    """Raise `RunError` if a folder that this process owns was removed or replaced."""
    if not is_ours(folder):
        raise RunError(
            f"{folder} was removed or replaced during its run, so the record is incomplete; delete it and "
            f"repeat the run"
        )


def is_ours(folder: Path) -> bool:
    """Return False if this process owned the folder, but it was removed or replaced; otherwise True."""
    file = _held.get(_place(folder))
    return file is None or _is_at(folder, file)


def in_use(folder: Path) -> bool:
    """Return whether a living process owns the folder; another user's folder counts as in use."""
    try:
        with (folder / OWNER).open() as opened:
            system.lock(opened, shared=True)
    except FileNotFoundError:
        return False
    except (BlockingIOError, PermissionError):
        return True
    return False


def _place(folder: Path) -> Path:
    return Path(os.path.abspath(folder))  # noqa: PTH100 - a link in it stays a link


def _lock(folder: Path) -> IO[str]:
    while True:
        file = open_file(folder / OWNER, "a+", private=True)  # whoever can open the file can lock it
        try:
            system.lock(file)
        except BlockingIOError:
            file.seek(0)
            pid = file.read().strip() or "another one"
            file.close()
            raise ConfigurationError(
                f"{folder} is in use: process {pid} writes the record of a run there; wait until that process ends, "
                "or choose another folder with --out"
            ) from None
        if _is_at(folder, file):
            break
        file.close()  # the owner before has removed it meanwhile
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def _is_at(folder: Path, file: IO[str]) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat((folder / OWNER).stat(), os.fstat(file.fileno()))
    return False
