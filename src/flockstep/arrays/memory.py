"""Returns free memory to the operating system."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys


def release(collect: bool = True) -> None:
    """Return free memory to the system, which Linux's C library would keep; with `collect`, collect garbage first."""
    if collect:
        gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def settle_down() -> None:
    """Return free memory to the system, and let all later collections of garbage pass over the objects that exist now,
    which last as long as the process: to look at all objects of torch takes a tenth of a second.
    """
    release()
    gc.freeze()
