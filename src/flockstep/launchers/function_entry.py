"""The function of `flockstep.launch`: the launcher stores it, each worker calls it and stores what it returned.

Function, arguments and results are pickled by cloudpickle, into files of a folder that only this user may enter. A
pickle can run any code, so flockstep reads pickles from such a folder only, and never from a socket or a record.
"""

from __future__ import annotations

import io
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import cloudpickle

from flockstep.errors import ConfigurationError
from flockstep.records.access import write_whole
from flockstep.records.scratch import require_private
from flockstep.runtime.node_spec import place_of_script

CALL = "call.pickle"
"""Name of the file with the function and its arguments, in the folder that the launcher shares with the workers."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle ships no types
    """Keeps the file names of functions, which cloudpickle drops, so that a worker's traceback shows file and line."""

    def reducer_override(self, obj: object) -> Any:
        if not isinstance(obj, CodeType):
            return super().reducer_override(obj)
        make, fields = self.dispatch_table[CodeType](obj)
        return make, tuple(obj.co_filename if field == "<dynamic-code>" else field for field in fields)


def _pickled(value: object) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def store(folder: Path, name: str, function: Callable[..., Any], args: Sequence[object]) -> None:
    """Store `function` and its arguments in `folder`; error messages call the function `name`.

    Raises:
        ConfigurationError: the function, an argument, or something that the function uses cannot be pickled.
    """
    try:
        call = _pickled((function, tuple(args)))
    except Exception as error:
        raise ConfigurationError(
            f"{name} or its arguments use a value that cannot be sent to another process ({error}); create the value "
            f"inside {name}"
        ) from error
    (folder / CALL).touch(mode=0o600)
    (folder / CALL).write_bytes(pickle.dumps(sys.path) + call)


def call(folder: Path) -> None:
    """Call the function in `folder` with its arguments, and store its result.

    A result that cannot be pickled does not end the run; the launching process raises an error that names the result.
    """
    require_private(folder)
    rank = place_of_script()[0]
    with (folder / CALL).open("rb") as file:
        sys.path[:] = pickle.load(file)  # first, because the function may come from a module on this path
        try:
            function, args = pickle.load(file)
            returned = function(*args)
        except Exception:
            write_whole(error_file(folder, rank), traceback.format_exc().encode())
            raise
    try:
        write_whole(result_file(folder, rank), _pickled(returned))
    except Exception as error:  # noqa: BLE001 - the user's classes may raise anything
        text = f"the result of rank {rank} cannot be sent to another process ({error}); return arrays or tensors"
        write_whole(error_file(folder, rank), text.encode())


def results(folder: Path, workers: int) -> dict[int, Any]:
    """Return rank → value that the function returned; a worker that died has no entry."""
    files = {rank: result_file(folder, rank) for rank in range(workers)}
    return {rank: pickle.loads(file.read_bytes()) for rank, file in files.items() if file.exists()}


def result_file(folder: Path, rank: int) -> Path:
    """Return the path of the file for the value that the function returned on the given rank."""
    return folder / f"returned-{rank}.pickle"


def error_file(folder: Path, rank: int) -> Path:
    """Return the path of the file that says why the given rank has no result: a traceback or a sentence."""
    return folder / f"error-{rank}.txt"


if __name__ == "__main__":
    call(Path(sys.argv[1]))
