"""Starts the agent of a host, whose part in the run comes on standard input.

python -m flockstep.launchers.task_entry
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import msgspec

from flockstep.errors import FlockstepError
from flockstep.launchers.output import Output
from flockstep.launchers.tasks import TaskFile, TaskSpec, run_task
from flockstep.launchers.wait_monitor import on_stderr


class WrittenSpec(msgspec.Struct, forbid_unknown_fields=True):
    """A task's specification as it travels on standard input."""

    host: str
    port: int
    secret: bytes
    timeout: float
    nodes: int
    node: int
    ranks: tuple[int, ...]
    config: str
    files: tuple[TaskFile, ...]
    arguments: tuple[str, ...]
    shown: Literal["all", "rank0", "none"]
    prefix: bool
    folder: str | None


def written(spec: TaskSpec) -> bytes:
    """The specification as JSON, for the standard input of a task."""
    names = [name for name in WrittenSpec.__struct_fields__ if name not in ("shown", "prefix", "folder")]
    fields = {name: getattr(spec, name) for name in names}
    output = spec.output
    folder = None if output.folder is None else str(output.folder)
    return msgspec.json.encode(WrittenSpec(**fields, shown=output.ranks, prefix=output.prefix, folder=folder))


def read(text: bytes) -> TaskSpec:
    """The specification that `written` wrote.

    Raises:
        ValueError: the text is none.
    """
    found = msgspec.json.decode(text, type=WrittenSpec)
    output = Output(found.shown, found.prefix, None if found.folder is None else Path(found.folder))
    names = [name for name in WrittenSpec.__struct_fields__ if name not in ("shown", "prefix", "folder")]
    return TaskSpec(**{name: getattr(found, name) for name in names}, output=output)


def main() -> int:
    """Be the agent; return the exit code."""
    try:
        run_task(read(sys.stdin.buffer.read()))
    except FlockstepError as error:
        on_stderr(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
