"""The folder of a fork server's socket, which the server removes when its process was killed."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import tempfile
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any

from flockstep.records.scratch import MARK, is_scratch, scratch

AFTER_MULTIPROCESSING = -200
"""Priority of an exit handler that runs after multiprocessing has removed its own temporary folder (-100)."""


@functools.cache
def house_fork_server() -> None:
    """Put the socket of multiprocessing's fork server into a folder of `scratch`, until this process exits."""
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
    if is_scratch(folder := _folder_of(server)):
        shutil.rmtree(folder, ignore_errors=True)


def _folder_of(server: Any) -> Path:
    """The folder of `scratch` that holds the socket of a fork server, unless multiprocessing has chosen its own."""
    return Path(os.fsdecode(server._forkserver_address)).parents[1]
