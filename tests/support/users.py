"""What another user of this machine can do to a run."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

OTHER = 65534
"""Id of a user that owns no file of ours."""
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="acts as a second user, which only root can")


@contextmanager
def common_folder() -> Iterator[Path]:
    """A folder in which every user may create files, and only remove their own, as in /tmp."""
    with tempfile.TemporaryDirectory(prefix="fs-", dir="/tmp") as name:
        Path(name).chmod(0o1777)
        yield Path(name)


def by_another_user(command: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a shell command, whose $1, $2, … are `words`, as another user."""
    arguments = ["/bin/sh", "-c", command, "sh", *map(str, words)]
    return subprocess.run(
        arguments, user=OTHER, group=OTHER, extra_groups=[], cwd="/", capture_output=True, text=True, check=False
    )
