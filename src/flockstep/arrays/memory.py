"""Returns free memory to the operating system."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys


def release(collect: bool = True) -> None:
    """Return freed memory, which Linux's C library would keep, to the operating system; with `collect`, collect garbage
    first.
    """
    if collect:
        gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def settle_down() -> None:
    """Prepare a process for a long run: return freed memory to the operating system, and exclude all existing objects
    from garbage collection.
    """
    release()
    gc.freeze()
