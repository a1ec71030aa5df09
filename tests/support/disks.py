"""File systems small enough to be full after a few writes."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(where: Path, size: str = "256k") -> Iterator[Path]:
    """A file system of that size, mounted at `where`; the test is skipped where none can be mounted."""
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(where)]
    mounted = subprocess.run(command, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted: {mounted.stderr.decode().strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


def fill(file: Path) -> None:
    """Take all the room on a disk."""
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as taken:
        while True:
            taken.write(b"0" * 512)
