"""numba's compiler, as the kernels use it: machine code is kept on disk, and the interpreter's lock let go."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


def jit(function: F) -> F:
    """Compile when it is called first. Strict IEEE arithmetic: sums keep their order."""
    return cast(F, _kept(numba.njit(cache=True, nogil=True, error_model="numpy")(function)))


def fast(function: F) -> F:
    """The same, but sums may be taken in another order, so that they run in vector registers; always the same one."""
    reordered = {"reassoc", "contract"}
    return cast(F, _kept(numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=reordered)(function)))


def _kept(dispatcher: Any) -> Any:
    """The compiled function, whose code on disk is good only for the very sources that it was made of.

    numba looks at the file of a function alone, but code of functions from other files is built into it.
    """
    file = dispatcher._cache._cache_file
    file._source_stamp = (*cast(tuple[Any, ...], file._source_stamp), _sources())
    return dispatcher


@cache
def _sources() -> str:
    """What changes when any file does that kernels may come from."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*here.glob("*.py"), *(here.parent.parent / "transports").glob("shared_*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()
