"""Starts the agent of a host, which reads its part in the run from standard input.

python -m flockstep.launchers.task_entry
"""

from __future__ import annotations

import signal
import sys

import msgspec

from flockstep.errors import FlockstepError
from flockstep.launchers.tasks import TaskSpec, run_task
from flockstep.launchers.wait_monitor import on_stderr


def written(spec: TaskSpec) -> bytes:
    """Return the specification as JSON, for the standard input of a task."""
    return msgspec.json.encode(spec, enc_hook=str)  # a path


def read(text: bytes) -> TaskSpec:
    """Return the specification that `written` wrote.

    Raises:
        ValueError: the text is not the JSON of a specification.
    """
    return msgspec.json.decode(text, type=TaskSpec, dec_hook=lambda kind, value: kind(value))


def _stop(signum: int, frame: object) -> None:
    raise KeyboardInterrupt(f"stopped by {signal.Signals(signum).name}")


def main() -> int:
    """Run the agent of this host; return the exit code of the process."""
    signal.signal(signal.SIGTERM, _stop)  # as Slurm sends it some time before it kills a job
    try:
        run_task(read(sys.stdin.buffer.read()))
    except FlockstepError as error:
        on_stderr(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
