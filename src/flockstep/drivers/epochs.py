"""Batches that are drawn epoch by epoch, with separate random numbers for each epoch."""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

B = TypeVar("B")


@dataclass
class EpochCount:
    """Counter of the epochs of an iterable: the number of the next epoch, from 0."""

    next: int = 0


_counts: weakref.WeakKeyDictionary[Iterable[Any], EpochCount] = weakref.WeakKeyDictionary()


def count_of(batches: Iterable[Any]) -> EpochCount:
    """Return the epoch counter of an iterable, the same object at each call.

    Lists and similar iterables, whose order never changes, get a new counter at each call.
    """
    try:
        return _counts.setdefault(batches, EpochCount())
    except TypeError:  # no weak references, or no hash
        return EpochCount()


class EpochBatches(ABC, Generic[B]):
    """A worker's batches of an iterable, epoch by epoch; other attributes are those of the iterable."""

    def __init__(self, batches: Iterable[B], rank: int, workers: int, count: EpochCount):
        self._batches = batches
        self._rank = rank
        self._workers = workers
        self._count = count

    @property
    def epoch(self) -> int:
        """Number of the next epoch, on which the order of shuffled batches depends."""
        return self._count.next

    @epoch.setter
    def epoch(self, number: int) -> None:
        self._count.next = number

    @abstractmethod
    def __iter__(self) -> Iterator[B]:
        """Yield the batches of one epoch."""

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self._batches, name)


def drawn(batches: Iterable[B], seed: int) -> Iterator[B]:
    """Iterate over `batches` with torch's global generator seeded by `seed` alone, even if the script seeds the
    generator by rank.
    """
    torch = sys.modules.get("torch")
    if torch is None:  # nothing draws from it
        yield from batches
        return
    state, iterator, end = torch.Generator().manual_seed(seed).get_state(), None, object()
    while True:
        own = torch.get_rng_state()
        torch.set_rng_state(state)
        try:
            iterator = iter(batches) if iterator is None else iterator
            batch: Any = next(iterator, end)
        finally:
            state = torch.get_rng_state()
            torch.set_rng_state(own)
        if batch is end:
            return
        yield batch
