"""Runs in which a command, such as ssh or srun, starts each host and passes on standard input and output.

On the host the command runs the agent, which reads its part in the run from standard input:
python -m flockstep.launchers.commands
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import msgspec

from flockstep.errors import FlockstepError
from flockstep.launchers.children import Script, begun, drain_all, reap, unbuffered
from flockstep.launchers.output import ERR, Sink
from flockstep.launchers.tasks import Starter, TaskSpec, run_task
from flockstep.launchers.wait_monitor import on_stderr
from flockstep.runtime.place import SECRET

GRACE = 5.0
"""Seconds that agents have to end by themselves after the run before their commands are killed."""
AGENT = ("-m", "flockstep.launchers.commands")
"""Arguments of the Python interpreter that runs the agent of a host."""


def by_command(
    names: Sequence[str],
    command: Callable[[str], list[str]],
    show: Sink,
    hint: Callable[[str, int], str] = lambda name, code: "",
) -> Starter:
    """Return a function that starts the agent of each host with a command.

    Args:
        names: names of the hosts.
        command: function that returns the words of the command for the host with a name.
        show: function that is called with the output of the hosts.
        hint: function that returns advice if the command for a host has failed with an exit code; empty for none.
    """

    def start(specs: Sequence[TaskSpec], stack: ExitStack) -> Callable[[], str | None]:
        last, scripts = dict.fromkeys(names, "no reason"), dict[str, Script]()

        def sink_of(name: str) -> Sink:
            def sink(stream: int, data: bytes) -> None:
                if stream == ERR and data.strip():
                    last[name] = data.decode(errors="replace").strip().splitlines()[-1]
                show(stream, data)

            return sink

        def failed() -> str | None:
            for name, script in scripts.items():
                if (code := script.exit_code()) is not None:
                    drain_all([script])  # the last line of its standard error is the reason
                    end = f"ended with exit code {code} before the run began: {last[name]}"
                    return f"{command(name)[0]} {name} {end}{hint(name, code)}"
            return None

        def end() -> None:
            reap([*scripts.values()], GRACE)  # agents end with their connection to the coordinator
            drain_all([*scripts.values()])

        environment = {name: value for name, value in os.environ.items() if name != SECRET}
        stack.callback(end)
        for name, spec in zip(names, specs, strict=True):
            with tempfile.TemporaryFile() as file:  # other users can read neither standard input nor its file
                file.write(msgspec.json.encode(spec, enc_hook=str))  # a path
                file.seek(0)
                process = begun(command(name), unbuffered(environment), file)
                scripts[name] = Script(process, (process.stdout, process.stderr), sink_of(name))
        return failed

    return start


def _stop(signum: int, frame: object) -> None:
    raise KeyboardInterrupt(f"stopped by {signal.Signals(signum).name}")


def main() -> int:
    """Run the agent of this host; return the exit code of the process."""
    signal.signal(signal.SIGTERM, _stop)  # as Slurm sends it some time before it kills a job
    try:
        run_task(msgspec.json.decode(sys.stdin.buffer.read(), type=TaskSpec, dec_hook=lambda kind, value: kind(value)))
    except FlockstepError as error:
        on_stderr(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
