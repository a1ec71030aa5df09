"""The peak of the memory that a run of workers needs, where memory that processes share counts once."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EVERY = 0.02
"""Seconds between two readings."""


@contextmanager
def watching(folder: Path) -> Iterator[dict[str, float]]:
    """Yield what will hold the peaks of this process and of all workers together, in bytes that belong to no file.

    A worker counts from its call of `ready` on, less what it had at that time.
    """
    peaks, done, first = {"launcher": 0.0, "workers": 0.0}, threading.Event(), written(os.getpid())

    def watch() -> None:
        while not done.wait(EVERY):
            peaks["launcher"] = max(peaks["launcher"], written(os.getpid()) - first)
            before = {path.name: float(path.read_text() or 0) for path in folder.glob("[0-9]*")}
            now = sum(written(int(pid)) for pid in before)
            peaks["workers"] = max(peaks["workers"], now - sum(before.values()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks
    finally:
        done.set()
        thread.join()


def ready(folder: Path) -> None:
    """Say that this process has imported what it needs, and has no model yet."""
    (folder / str(os.getpid())).write_text(str(written(os.getpid())))


def written(pid: int) -> float:
    """Bytes of memory that belong to no file, each shared byte divided among the processes that map it."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return sum(1024.0 * int(size) for size in re.findall(r"Pss_(?:Anon|Shmem):\s+(\d+) kB", text))
    return 0.0
