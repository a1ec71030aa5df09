"""Ensures that only one process compiles a kernel that several processes need at once; the others load its machine code
from the cache.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from flockstep import system

PATIENCE = 60.0
"""Seconds that a process waits for another process to compile a kernel; then the waiting process compiles the kernel
itself.
"""
_turns = threading.RLock()
_depth = 0
"""Number of kernels that this process is compiling: a kernel that calls others compiles these too."""


def compiled_once(dispatcher: Any) -> Any:
    """Let only one of the processes that share a cache on disk compile the kernel; the other processes wait, and load
    it from the cache.
    """
    compile_here: Callable[[Any], Any] = dispatcher.compile

    def compile_or_wait(signature: Any) -> Any:
        known = _is_on_disk(dispatcher, signature)
        with nullcontext() if known else _turn(Path(dispatcher._cache.cache_path)):
            return compile_here(signature)  # numba looks on disk again

    dispatcher.compile = compile_or_wait
    return dispatcher


def _is_on_disk(dispatcher: Any, signature: Any) -> bool:
    cache = dispatcher._cache
    return cache._index_key(signature, dispatcher.targetctx.codegen()) in cache._cache_file._load_index()


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Compile while no other process does; a folder that cannot be written to has no cache to wait for."""
    global _depth
    with _turns:
        file = _open(folder) if _depth == 0 else None
        _depth += 1
        try:
            if file is not None:
                _lock(file)
            yield
        finally:
            _depth -= 1
            if file is not None:
                os.close(file)  # which unlocks it


def _open(folder: Path) -> int | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return os.open(folder / "compiling.lock", os.O_RDWR | os.O_CREAT)
    except OSError:
        return None


def _lock(file: int) -> None:
    """Wait for the lock, `PATIENCE` seconds at most."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            system.lock(file)
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:  # a file system without locks
            return
        else:
            return
