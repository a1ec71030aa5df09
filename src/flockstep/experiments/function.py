"""Runs a function on several worker processes, from a cell of a notebook or from a script."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from flockstep.errors import ConfigurationError, FlockstepError, Interrupted, RunError
from flockstep.experiments.folders import folder
from flockstep.experiments.options import RecordOptions, configured, takes
from flockstep.experiments.single import RunResult
from flockstep.launchers import function_entry
from flockstep.launchers.children import GUARD
from flockstep.launchers.executable import AS_THE_SCRIPT_SAYS
from flockstep.launchers.output import OUT, Output
from flockstep.launchers.script import launch as launch_script
from flockstep.options import BadGradientOptions, CommonOptions, Opt, ProcessOptions, Workers
from flockstep.records.access import write_whole
from flockstep.records.folder import FUNCTION, RunFolder
from flockstep.records.scratch import scratch
from flockstep.runtime.node_spec import refuse, spec_from_environment


@dataclass(frozen=True)
class LaunchResult(RunResult):
    """The result of running a function on workers: the run's record, and what the function returned."""

    returned: dict[int, Any] = field(default_factory=dict)
    """Rank → value that the function returned on this rank; a worker that died has no entry."""


@dataclass(frozen=True)
class CalledFunction:
    """A function, and what it is called with on each worker."""

    function: Annotated[
        Callable[..., Any], Opt("A function, or any other callable object that cloudpickle can pickle.")
    ]
    workers: Workers = 4
    args: Sequence[object] = Opt("Arguments of the function.").default(())


@dataclass(frozen=True)
class FunctionOptions(RecordOptions, ProcessOptions, BadGradientOptions, CommonOptions, CalledFunction):
    """Options of a function that is run on several workers."""

    workers: Workers = 4
    prefix: Annotated[bool, Opt("Whether each line that the processes print begins with its rank.")] = field(
        default=True, kw_only=True
    )


@takes(FunctionOptions)
def launch(options: FunctionOptions) -> LaunchResult:
    """Run `function(*args)` on `workers` new processes of this machine, as `flockstep launch` runs a script.

    The function calls `flockstep.distribute`, and returns the value that the caller needs, such as the model. Each
    process starts fresh, and receives a copy of the function, its arguments and everything that the function uses,
    which cloudpickle makes: closures, lambdas, models and data travel, and modules are imported again. An open file or
    a lock must be created inside the function. The record holds the source of the function.

    In a notebook nothing more is needed; interrupting the kernel ends all processes and keeps the record. A script must
    guard the call with `if __name__ == "__main__":`, because servers import the script again.

    Returns:
        The finished run, with what the function returned on each rank.

    Raises:
        ConfigurationError: the function, or something that it uses, cannot be sent to another process; or an argument
            is invalid.
        RunError: the run failed or was interrupted, and the record is complete up to that point; or the run has
            finished, but a result cannot be sent back. If the function raised an exception, a note of the error holds
            its traceback.
    """
    if (node_spec := spec_from_environment()) is not None:  # a worker would start the run again, without end
        unguarded = ConfigurationError(GUARD)
        refuse(unguarded, node_spec)
        raise unguarded
    function, workers = options.function, options.workers
    if not callable(function):
        raise ConfigurationError(
            f"launch takes a function, got {type(function).__name__}; write one with def, and give its arguments as "
            "args=(…,)"
        )
    if not isinstance(options.args, (tuple, list)):
        raise ConfigurationError(f"args must be a tuple of the function's arguments, got {options.args!r}; write (…,)")
    name = getattr(function, "__name__", type(function).__name__).strip("<>")
    config = replace(configured("launch", options, name, AS_THE_SCRIPT_SAYS), prefix=None)
    record = RunFolder(folder(options.out, f"launch-{name}"))
    before = record.begun

    def show(stream: int, data: bytes) -> None:  # where this program prints, as into the output of a notebook's cell
        target = sys.stdout if stream == OUT else sys.stderr
        target.write(data.decode(errors="replace"))
        target.flush()

    with scratch() as place:
        function_entry.store(place, name, function, options.args)
        errors = {rank: function_entry.error_file(place, rank) for rank in range(workers)}
        script, shown = Path(function_entry.__file__), Output(prefix=options.prefix, show=show)
        try:
            launch_script(script, [str(place)], config, record.path, shown, options.overwrite)
        except FlockstepError as error:
            # the function failed, and the run has neither told of it nor refused what the function would have joined
            failed = [rank for rank, file in errors.items() if file.exists()]
            told = getattr(error, "__notes__", ()) or isinstance(error, (Interrupted, ConfigurationError))
            if failed and not told:
                error.add_note(f"worker {failed[0]}: {errors[failed[0]].read_text()}")
            raise
        finally:
            if record.begun not in (None, before):
                with contextlib.suppress(OSError, TypeError):  # Python does not know the source of every function
                    write_whole(record.path / FUNCTION / "source.py", inspect.getsource(function).encode())
        for file in errors.values():  # a result could not travel here, or the function failed after its run
            if file.exists():
                raise RunError(f"{file.read_text()}; the run itself has finished, and its record is in {record.path}")
        returned = function_entry.results(place, workers)
    return LaunchResult(record.path, record.read_config(), record.read_summary(), returned)
