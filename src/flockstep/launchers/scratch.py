"""Temporary folders for sockets; a fork server removes its own, and each run those that killed processes have left."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any

from flockstep.errors import ConfigurationError
from flockstep.records.owner import OWNER, owned

PREFIX = "flockstep-"
MARK = ".sockets"
"""Name of an empty file that marks a folder as made by `scratch`. An owner file does not show this, because records
have one, too.
"""
AFTER_MULTIPROCESSING = -200
"""Priority of an exit handler that runs after multiprocessing has removed its own temporary folder (-100)."""
LONGEST = 50
"""Maximum length of a temporary folder's path in bytes; the fork server's socket in it may have a path of at most 104
bytes.
"""


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Context manager that creates a temporary folder owned by this process, and removes the folders that killed
    processes have left.
    """
    pid = os.getpid()
    sweep(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
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
            if _is_ours(folder) and (folder / OWNER).stat().st_size:
                with owned(folder):
                    shutil.rmtree(folder)


def _is_ours(folder: Path) -> bool:
    """Whether this user's `scratch` created the folder, and no run has its record in it."""
    mark = folder / MARK
    return (
        folder.is_dir()
        and not folder.is_symlink()
        and mark.is_file()
        and not mark.is_symlink()
        and folder.stat().st_uid == os.getuid()
        and not (folder / "config.toml").exists()
    )


@functools.cache
def house_fork_server() -> None:
    """Put the socket of multiprocessing's fork server into a folder of `scratch`, until this process exits. If the path
    would be too long for a socket, multiprocessing chooses its own folder.
    """
    if len(tempfile.gettempdir()) > LONGEST:
        return
    stack = contextlib.ExitStack()
    folder = stack.enter_context(scratch())
    util.Finalize(None, stack.close, exitpriority=AFTER_MULTIPROCESSING)
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        util.get_temp_dir()
    finally:
        tempfile.tempdir = before


def end_fork_server() -> None:
    """End this process's fork server and remove its folder, for a process that may end without running exit handlers.

    The next fork starts another server.
    """
    server: Any = forkserver._forkserver  # multiprocessing has no public way
    if server._forkserver_address is not None:  # the server must not remove the socket that _stop removes
        (_folder_of(server) / MARK).unlink(missing_ok=True)
    server._stop()
    util._run_finalizers()  # type: ignore[attr-defined]
    house_fork_server.cache_clear()


@atexit.register
def _leave_no_socket() -> None:
    """In a fork server that ends, remove the folder of its socket, which a killed process has left behind.

    A fork server ends last, once the process that started it and all forked nodes have ended.
    """
    server: Any = forkserver._forkserver  # it knows its address; all others hold its pipe
    if server._forkserver_address is None or server._forkserver_alive_fd is not None:
        return
    if _is_ours(folder := _folder_of(server)):
        shutil.rmtree(folder, ignore_errors=True)


def _folder_of(server: Any) -> Path:
    """The folder of `scratch` that holds the socket of a fork server, unless multiprocessing has chosen its own."""
    return Path(os.fsdecode(server._forkserver_address)).parents[1]
