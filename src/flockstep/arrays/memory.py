"""Returns memory that is free to the system."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys


def release(collect: bool = True) -> None:
    """Return free memory to the system, which the C library of Linux would keep; with `collect`, garbage before."""
    if collect:
        gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
