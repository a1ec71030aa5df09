"""Finds the places in the user's own files: where an error occurred, and from which line a script called flockstep."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from flockstep.errors import SHOWS_TRACEBACK, in_short


class ScriptCall(NamedTuple):
    """A call of flockstep in the user's script."""

    function: str
    """Name of the function or method that the script has called."""
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function}() ({self.file}, line {self.line})"


def script_call() -> ScriptCall | None:
    """Return the call of flockstep that the user's script is in; None if no file of the user is on the stack."""
    frame: FrameType | None = sys._getframe(1)
    name = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_the_users(file):
            return ScriptCall(name, Path(file).name, frame.f_lineno)
        if file.startswith(_ours()):
            name = frame.f_code.co_name
        frame = frame.f_back
    return None


def place_of(error: Exception) -> str:
    """Return where in the user's own files an error occurred, as " (script.py, line 7)"; empty if the error did not
    pass through such a file.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_the_users(frame.filename):
            return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return ""


def said_of(error: Exception, where: str) -> str:
    """Return the sentence that reports an error of the user's code; `where` says what raised the error."""
    return f"{where} raised {in_short(error)}{place_of(error)}{SHOWS_TRACEBACK}"


@cache
def _ours() -> str:
    return f"{Path(__file__).parents[1]}{os.sep}"


@cache
def _others() -> tuple[str, ...]:
    return (_ours(), *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib")), "<")


def _is_the_users(file: str) -> bool:
    return not file.startswith(_others())
