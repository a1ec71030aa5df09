"""The worker's side of `flockstep.launch`: calls the function, and leaves its result where the launcher reads it."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flockstep.drivers.node_spec import place_of_script
from flockstep.drivers.state import from_bytes, to_bytes
from flockstep.errors import ConfigurationError
from flockstep.records.full_disk import replace

PROGRAM, VALUES = "program.py", "values.bin"
"""Names of the files with the program and with the values of a launched function, in the folder that the launcher
shares with the workers.
"""

_FOLDER = Path(sys.argv[0]).resolve().parent
"""Folder of the program, in a worker."""


def value(name: str) -> Any:
    """Return the value that `name` has in the program that called `flockstep.launch`."""
    return from_bytes(_values()["names"][name])


def call(function: Callable[..., Any]) -> None:
    """Call the function with the arguments that were given to `flockstep.launch`, and store its result.

    A result that cannot be sent to the launching process does not end the run; the launching process raises an error
    that names the result.
    """
    rank, name = place_of_script()[0], function.__name__
    try:
        returned = function(*map(from_bytes, _values()["args"]))
    except Exception:
        replace(error_file(_FOLDER, rank), traceback.format_exc().encode())
        raise
    try:
        replace(result_file(_FOLDER, rank), to_bytes(returned, f"the result of {name}"))
    except ConfigurationError as error:
        replace(error_file(_FOLDER, rank), str(error).encode())


def result_file(folder: Path, rank: int) -> Path:
    """Return the path of the file for the value that the function returned on the given rank."""
    return folder / f"returned-{rank}.bin"


def error_file(folder: Path, rank: int) -> Path:
    """Return the path of the file that says why the given rank has no result: a traceback or a sentence."""
    return folder / f"error-{rank}.txt"


@functools.cache
def _values() -> dict[str, Any]:
    found: dict[str, Any] = from_bytes((_FOLDER / VALUES).read_bytes())
    return found
