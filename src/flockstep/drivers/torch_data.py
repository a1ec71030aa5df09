"""`flockstep.shard` for PyTorch: each worker's part of a data loader."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from flockstep.drivers.ticket import place_of_script, ticket_from_environment
from flockstep.errors import ConfigurationError

B = TypeVar("B")


class Shard(Generic[B]):
    """This worker's part of a loader's batches; as many on every worker."""

    def __init__(self, loader: Iterable[B], rank: int, workers: int):
        self._loader = loader
        self._rank = rank
        self._workers = workers

    def __iter__(self) -> Iterator[B]:
        batches = iter(self._loader)
        while len(turn := list(itertools.islice(batches, self._workers))) == self._workers:
            yield turn[self._rank]

    def __len__(self) -> int:
        return len(self._loader) // self._workers  # type: ignore[arg-type]


_epochs: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class ShardedLoader(Generic[B]):
    """A data loader over this worker's part of the data set, drawn anew each time it is iterated."""

    def __init__(self, loader: DataLoader[B], rank: int, workers: int):
        self._original = loader
        shuffled = isinstance(loader.sampler, RandomSampler)
        self._sampler: DistributedSampler[Any] = DistributedSampler(
            loader.dataset, workers, rank, shuffle=shuffled, drop_last=loader.drop_last
        )
        self._loader: DataLoader[B] = DataLoader(
            loader.dataset,
            batch_size=loader.batch_size,
            sampler=self._sampler,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            drop_last=loader.drop_last,
        )

    def __iter__(self) -> Iterator[B]:
        epoch = _epochs.get(self._original, 0)
        _epochs[self._original] = epoch + 1
        self._sampler.set_epoch(epoch)
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)


def shard(loader: Iterable[B]) -> Iterable[B]:
    """This worker's part of what `loader` yields; all of it where nobody launched several workers.

    A `DataLoader` over a data set that can be indexed is split by samples, reshuffled each epoch if it shuffles. From
    anything else worker i of n takes every n-th batch; what is left over at the end is dropped, so that every worker
    takes as many steps.

    Raises:
        ConfigurationError: the loader has a sampler of its own, which says already who gets what.
    """
    place_of_script()
    ticket = ticket_from_environment()
    if ticket is None or ticket.workers == 1:
        return loader
    if isinstance(loader, DataLoader) and loader.batch_size is not None and hasattr(loader.dataset, "__getitem__"):
        if not isinstance(loader.sampler, (RandomSampler, SequentialSampler)):
            raise ConfigurationError(
                f"the loader has a {type(loader.sampler).__name__} of its own; leave the sampler out and let "
                "flockstep.shard split the data, or split it yourself and do not call flockstep.shard"
            )
        return ShardedLoader(loader, ticket.address, ticket.workers)
    return Shard(loader, ticket.address, ticket.workers)
