"""numba's compiler with the kernels' settings: machine code is cached on disk, and the interpreter's lock is
released.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

from flockstep.arrays.kernels.compiling import compiled_once

F = TypeVar("F", bound=Callable[..., Any])


def jit(function: F) -> F:
    """Compile a function with numba at its first call, with strict IEEE arithmetic: sums are added in the order in
    which they are written.
    """
    return cast(F, _kept(compiled_once(numba.njit(cache=True, nogil=True, error_model="numpy")(function))))


def fast(function: F) -> F:
    """Compile a function as `jit` does, except that sums may be reordered to use vector registers.

    The order of a sum is the same in every call.
    """
    reordered = {"reassoc", "contract"}
    return cast(
        F, _kept(compiled_once(numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=reordered)(function)))
    )


def _kept(dispatcher: Any) -> Any:
    """Make a compiled function's cache on disk valid only for the exact sources that it was compiled from.

    numba checks the function's own file only, but code of functions from other files is compiled into it.
    """
    file = dispatcher._cache._cache_file
    file._source_stamp = (*cast(tuple[Any, ...], file._source_stamp), _sources())
    return dispatcher


@cache
def _sources() -> str:
    """Return a hash of all files that kernels may come from."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*here.glob("*.py"), *(here.parent.parent / "transports").glob("shared_*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()
