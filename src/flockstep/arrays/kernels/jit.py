"""Kernels for numpy arrays: loops that numba compiles where it is installed, each beside a function of plain numpy that
runs where it is not.

Machine code is cached on disk, and the interpreter's lock is released while a compiled kernel runs.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from flockstep.arrays.kernels.compiling import compiled_once

F = TypeVar("F", bound=Callable[..., Any])


COMPILES = importlib.util.find_spec("numba") is not None
"""Whether kernels are compiled, that is, whether numba is installed."""


def jit(function: F) -> F:
    """Compile a function with numba at its first call, with strict IEEE arithmetic: sums are added in the order in
    which they are written. Without numba the function stays as it is.
    """
    return _compiled(function) if COMPILES else function


def fast(function: F) -> F:
    """Compile a function as `jit` does, except that sums may be reordered to use vector registers.

    The order of a sum is the same in every call.
    """
    return _compiled(function, fastmath={"reassoc", "contract"}) if COMPILES else function


def beside(plain: Callable[..., Any], compiled: Callable[[Any], Any] = jit) -> Callable[[Any], Any]:
    """Decorator for a kernel: the loop is compiled where numba is installed, otherwise `plain` is called in its place,
    with the same arguments and the same result (of sums of a loop compiled by `fast`, up to rounding).
    """
    return lambda loop: compiled(loop) if COMPILES else np.errstate(all="ignore")(plain)


def _compiled(function: F, **settings: Any) -> F:
    import numba

    dispatcher: Any = compiled_once(numba.njit(cache=True, nogil=True, error_model="numpy", **settings)(function))
    # numba checks the function's own file only, but code of functions from other files is compiled into it: the cache
    # on disk is valid only for the exact sources of all kernels.
    file = dispatcher._cache._cache_file
    file._source_stamp = (*cast(tuple[Any, ...], file._source_stamp), _sources())
    return cast(F, dispatcher)


@cache
def _sources() -> str:
    """Return a hash of all files that kernels may come from."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*here.glob("*.py"), *(here.parent.parent / "links").glob("shared_*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()
