"""Python's garbage collector during a simulation: collections are rare, and its settings are restored."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

ALLOCATIONS = 100_000
"""Threshold of the youngest generation: allocations less deallocations that start a collection. Python's is 700."""


@contextmanager
def seldom() -> Iterator[None]:
    """Collect garbage seldom, and only among objects created in the `with` block; restore all settings afterwards.

    A simulation keeps its nodes until its end, and reference counts free almost everything else. With 1,024 workers
    the collector's passes over the nodes took a quarter of the time.
    """
    threshold, whole = gc.get_threshold(), not gc.get_freeze_count()
    if whole:  # otherwise objects that other code has frozen would be unfrozen below
        gc.freeze()
    gc.set_threshold(max(threshold[0], ALLOCATIONS) if threshold[0] else 0, *threshold[1:])
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        if whole:
            gc.unfreeze()
