"""A folder has one owner at a time: the process that holds a lock on a file in it and writes the record."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from flockstep.errors import ConfigurationError, RunError

OWNER = ".owner"
"""Name of the file that the owner of a folder holds locked; the file contains the owner's process id."""
_held: dict[Path, IO[str]] = {}


@contextlib.contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Context manager that owns a folder and creates it if it is missing.

    The system releases the lock if the process dies.

    Raises:
        ConfigurationError: another run owns the folder.
    """
    pid, folder = os.getpid(), Path(os.path.abspath(folder))  # noqa: PTH100 - a link in it stays a link
    folder.mkdir(parents=True, exist_ok=True)
    _held[folder] = file = _lock(folder)
    try:
        yield
    finally:
        del _held[folder]
        if os.getpid() == pid and _is_at(folder, file):
            (folder / OWNER).unlink()
        file.close()


def check(folder: Path) -> None:
    """Check that a folder owned by this process has not been replaced.

    Raises:
        RunError: the folder was removed, or another folder is in its place.
    """
    if not is_ours(folder):
        raise RunError(
            f"{folder} was removed or replaced during its run, so the record is incomplete; delete it and "
            f"repeat the run"
        )


def is_ours(folder: Path) -> bool:
    """Whether a folder is in place; False only if this process owned the folder and the folder was removed or
    replaced.
    """
    file = _held.get(Path(os.path.abspath(folder)))  # noqa: PTH100
    return file is None or _is_at(folder, file)


def in_use(folder: Path) -> bool:
    """Whether a process owns the folder; the system releases the folder of a process that dies."""
    import fcntl

    try:
        with (folder / OWNER).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _lock(folder: Path) -> IO[str]:
    import fcntl  # not on Windows, where records can be read

    while True:
        file = (folder / OWNER).open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
