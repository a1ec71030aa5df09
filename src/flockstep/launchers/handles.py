"""Counts the file handles that a run needs before it starts: a process without a free one fails in odd places."""

from __future__ import annotations

import os

from flockstep.errors import ConfigurationError

AT_FIRST = 20
"""Handles of a supervisor without processes: sockets, the fork server's pipes, the evaluation, files of the record."""
EACH = 8
"""Handles of a supervisor for each process of its run: sockets, monitors, pipes, a file of events. Processes need
fewer in all."""


def require_handles(processes: int, more: int = AT_FIRST) -> None:
    """Check that this process may open the files and sockets of a supervisor of so many processes.

    Raises:
        ConfigurationError: its limit is lower.
    """
    import resource  # not on Windows, where records can be read

    needed = len(os.listdir("/dev/fd")) + more + EACH * processes  # noqa: PTH208 - a count
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit not in (resource.RLIM_INFINITY, -1) and limit < needed:
        raise ConfigurationError(
            f"a run of this size opens up to {needed} files and sockets in one process, and the limit is {limit}; "
            f"raise the limit (ulimit -n {needed}), or use fewer workers"
        )
