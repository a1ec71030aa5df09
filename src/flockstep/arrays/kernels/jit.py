"""numba's compiler, as the kernels use it: machine code is kept on disk, and the interpreter's lock let go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])

jit = cast(Callable[[F], F], numba.njit(cache=True, nogil=True, error_model="numpy"))
"""Strict IEEE arithmetic: sums keep their order."""
fast = cast(Callable[[F], F], numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract"}))
"""Sums may be taken in another order, so that they run in vector registers; still the same every time."""
