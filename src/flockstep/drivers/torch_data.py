"""`flockstep.shard` for PyTorch: each worker's part of a data loader."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from flockstep.drivers.ticket import place_of_script, ticket_from_environment
from flockstep.errors import ConfigurationError

B = TypeVar("B")


class Shard(Generic[B]):
    """Every n-th batch of an iterable, which has all its attributes; equally many batches on every worker."""

    def __init__(self, batches: Iterable[B], rank: int, workers: int):
        self._batches = batches
        self._rank = rank
        self._workers = workers
        self._epoch = 0

    def __iter__(self) -> Iterator[B]:
        batches = _drawn_alike(self._batches, self._epoch)
        self._epoch += 1
        while len(turn := list(itertools.islice(batches, self._workers))) == self._workers:
            yield turn[self._rank]

    def __len__(self) -> int:
        return len(self._batches) // self._workers  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._batches, name)


def _drawn_alike(batches: Iterable[B], seed: int) -> Iterator[B]:
    """Iterate with a torch generator that is the same on every worker, whose script may have seeded its own by rank."""
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


class _EpochSampler(DistributedSampler[Any]):
    """Shuffles anew each time it is iterated."""

    def __iter__(self) -> Iterator[Any]:
        indices = super().__iter__()
        self.epoch += 1
        yield from indices


_shards: weakref.WeakKeyDictionary[DataLoader[Any], Iterable[Any]] = weakref.WeakKeyDictionary()
"""One for each loader: epochs are counted, and persistent workers live, across calls of `shard`."""


def shard(loader: Iterable[B]) -> Iterable[B]:
    """This worker's part of what `loader` yields; all of it where nobody launched several workers.

    A `DataLoader` over a data set that can be indexed is split by samples, reshuffled each epoch if it shuffles, and
    stays as it is otherwise. Where it has a `batch_sampler`, worker i of n takes every n-th of its batches, as it does
    from an `IterableDataset` and from anything else, whose order has to be the same on every worker; what is left over
    at the end is dropped, so that every worker takes as many steps. What torch's own generator draws for that order is
    the same on every worker, however a script has seeded it.

    Raises:
        ConfigurationError: the loader has a sampler of its own, which says already who gets what.
    """
    place_of_script()
    ticket = ticket_from_environment()
    if ticket is None or ticket.workers == 1:
        return loader
    if not isinstance(loader, DataLoader):
        return Shard(loader, ticket.address, ticket.workers)
    if loader not in _shards:
        _shards[loader] = _split(loader, ticket.address, ticket.workers)
    return _shards[loader]


def _split(loader: DataLoader[B], rank: int, workers: int) -> Iterable[B]:
    """A copy of the loader, which keeps all that was given to it, over this worker's part alone."""
    part = copy.copy(loader)
    if isinstance(loader.dataset, IterableDataset):
        return Shard(part, rank, workers)
    if loader.batch_size is None and loader.batch_sampler is not None:
        _replace(part, "batch_sampler", Shard(loader.batch_sampler, rank, workers))
        return part
    _require_plain(loader)
    shuffled = isinstance(loader.sampler, RandomSampler)
    sampler = _EpochSampler(loader.dataset, workers, rank, shuffle=shuffled, drop_last=loader.drop_last)
    _replace(part, "sampler", sampler)
    if loader.batch_size is not None:
        _replace(part, "batch_sampler", BatchSampler(sampler, loader.batch_size, loader.drop_last))
    return part


def _replace(loader: DataLoader[Any], name: str, value: object) -> None:
    """Set what a loader lets nobody set, before its first use."""
    object.__setattr__(loader, name, value)


def _require_plain(loader: DataLoader[Any]) -> None:
    """Raise unless the loader's sampler takes every sample once, in order or shuffled."""
    sampler: Any = loader.sampler
    kind, samples = type(sampler), len(loader.dataset)  # type: ignore[arg-type]
    if kind is SequentialSampler or (kind is RandomSampler and not sampler.replacement and len(sampler) == samples):
        return
    raise ConfigurationError(
        f"the loader has a {kind.__name__} of its own; leave the sampler out and let flockstep.shard split the data, "
        "give it as batch_sampler=BatchSampler(sampler, …) to split its batches, or let it draw by flockstep.rank() "
        "and do not call flockstep.shard"
    )
