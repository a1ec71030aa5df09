"""Controls Python's garbage collector during a simulation: collections are rare, and the former settings are restored
afterwards.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

ALLOCATIONS = 100_000
"""Number of allocations, minus deallocations, after which Python collects the youngest generation of objects.

Python's default is 700.
"""
PASSES = 1_000
"""Number of collections of a generation after which Python collects the next older generation.

Python's default is 10.
"""


class _Inside:
    """Number of simulations that go on in this process, and the thresholds before the first of them."""

    lock = threading.Lock()
    count = 0
    before = (0, 0, 0)


@contextmanager
def seldom() -> Iterator[None]:
    """Context manager in which Python collects garbage less often; the former thresholds are restored when the last
    such block ends.

    A simulation keeps its nodes until its end, and reference counts free almost everything else. With 1,024 workers
    the collector's passes over the nodes took a quarter of the time.
    """
    with _Inside.lock:
        if not _Inside.count:
            _Inside.before = first, second, third = gc.get_threshold()
            if first:
                gc.set_threshold(max(first, ALLOCATIONS), max(second, PASSES), max(third, PASSES))
        _Inside.count += 1
    try:
        yield
    finally:
        with _Inside.lock:
            _Inside.count -= 1
            if not _Inside.count:
                gc.set_threshold(*_Inside.before)
