"""Checks the limit of open files before a run starts, because a process that reaches the limit fails at unpredictable
places.
"""

from __future__ import annotations

import os

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
