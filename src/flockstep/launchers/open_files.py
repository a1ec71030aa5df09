"""Checks, before a run starts, that this machine can hold its processes: open files and cores."""

from __future__ import annotations

import math
import os

from flockstep import system
from flockstep.errors import ConfigurationError

FILES_OF_SUPERVISOR = 20
"""Number of file descriptors that a supervisor needs for itself: sockets, the fork server's pipes, the evaluation, and
files of the record.
"""
FILES_PER_PROCESS = 8
"""Number of file descriptors that a supervisor needs for each process of its run: sockets, monitors, pipes and an
event file.

A process of the run needs fewer descriptors than the supervisor.
"""

SHARE = 6.0
"""Largest number of workers on one core for each second of the heartbeat: more of them do not answer in time."""


def require_cores(workers: int, heartbeat: float) -> None:
    """Check that `workers` workers of this machine get a turn within the heartbeat.

    Raises:
        ConfigurationError: the machine has too few cores.
    """
    cores = system.cores()
    if workers > SHARE * heartbeat * cores:
        needed = math.ceil(workers / SHARE / cores)
        raise ConfigurationError(
            f"{workers} workers on the {cores} cores of this machine would not all answer within --heartbeat "
            f"{heartbeat:g}; use at most {int(SHARE * heartbeat * cores)} workers (-n), or --heartbeat {needed}, or "
            "flockstep simulate, which trains any number of workers in virtual time"
        )


def require_open_files(processes: int, more: int = FILES_OF_SUPERVISOR) -> None:
    """Check that this process may open all the files and sockets that a supervisor of `processes` processes needs.

    Raises:
        ConfigurationError: the limit of open files is too low.
    """
    import resource  # not on Windows, where records can be read

    needed = len(os.listdir("/dev/fd")) + more + FILES_PER_PROCESS * processes  # noqa: PTH208 - a count
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit not in (resource.RLIM_INFINITY, -1) and limit < needed:
        raise ConfigurationError(
            f"a run of this size opens up to {needed} files and sockets in one process, but the limit is {limit}; "
            f"raise the limit (ulimit -n {needed}), or use fewer workers"
        )
