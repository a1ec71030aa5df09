"""Detects whether the kernel killed a process of this run because memory ran out."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from pathlib import Path

VMSTAT = Path("/proc/vmstat")
CGROUP = Path("/proc/self/cgroup")
EVENTS = Path("/sys/fs/cgroup")


def oom_kills() -> int:
    """Return the number of processes that the kernel has killed for lack of memory, on this host and in this control
    group.
    """
    files = [VMSTAT]
    with contextlib.suppress(OSError):
        groups = [line.partition("::")[2] for line in CGROUP.read_text().splitlines() if line.startswith("0::")]
        files += [EVENTS / group.lstrip("/") / "memory.events" for group in groups]
    count = 0
    for file in files:
        with contextlib.suppress(OSError):
            count += next((int(line[9:]) for line in file.read_text().splitlines() if line.startswith("oom_kill ")), 0)
    return count


class OutOfMemoryDetector:
    """Detects, from a counter of the kernel, whether processes were killed for lack of memory since the start of the
    run.
    """

    def __init__(self, count: Callable[[], int] = oom_kills):
        self._count = count
        self._before = count()

    def explain(self, code: int) -> str:
        """Return text to append to a message about an exit code; empty unless SIGKILL ended the process and the kernel
        has killed processes for lack of memory.
        """
        if code != -signal.SIGKILL or self._count() <= self._before:
            return ""
        return ", probably by the kernel for lack of memory; use fewer workers, or a smaller model or batch"
