"""Each worker's part of a PyTorch data loader."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from flockstep.drivers.data_digest import tell_data
from flockstep.drivers.epochs import EpochCount
from flockstep.drivers.every_nth import ShardedBatches
from flockstep.errors import ConfigurationError

B = TypeVar("B")


class _EpochSampler(DistributedSampler[Any]):
    """Shuffles again in each iteration."""

    def __iter__(self) -> Iterator[Any]:
        tell_data(f"{len(self.dataset)} samples")  # type: ignore[arg-type]
        indices = super().__iter__()
        self.epoch += 1
        yield from indices


_shards: weakref.WeakKeyDictionary[DataLoader[Any], Iterable[Any]] = weakref.WeakKeyDictionary()
"""Loader → its part: epochs are counted, and persistent workers survive, across calls of `shard`."""


def split(loader: DataLoader[B], rank: int, workers: int) -> Iterable[B]:
    """Return this worker's part of a data loader; each call with the same loader returns the same object.

    Raises:
        ConfigurationError: the loader has a custom sampler, which already assigns the samples, or a worker would get
            no batch.
    """
    if loader not in _shards:
        _shards[loader] = _split(loader, rank, workers)
    return _shards[loader]


def set_epoch(part: Iterable[Any], epoch: int) -> None:
    """Set the number of the next epoch of a worker's part, which determines the order of shuffled samples."""
    drawn: Any = part
    if isinstance(part, DataLoader):
        drawn = part.batch_sampler if isinstance(part.batch_sampler, ShardedBatches) else part.sampler
    drawn.epoch = epoch


def _split(loader: DataLoader[B], rank: int, workers: int) -> Iterable[B]:
    """A copy of the loader with all its settings, over this worker's part alone."""
    part = copy.copy(loader)
    _replace(part, "_iterator", None)  # worker processes of a loader in use would continue with all samples
    if isinstance(loader.dataset, IterableDataset):
        return ShardedBatches(part, rank, workers, EpochCount())
    if loader.batch_size is None and loader.batch_sampler is not None:
        _replace(part, "batch_sampler", ShardedBatches(loader.batch_sampler, rank, workers, EpochCount()))
        return part
    _require_plain(loader)
    shuffled = isinstance(loader.sampler, RandomSampler)
    sampler = _EpochSampler(loader.dataset, workers, rank, shuffle=shuffled, drop_last=loader.drop_last)
    _replace(part, "sampler", sampler)
    if loader.batch_size is not None:
        _require_batch(loader, len(sampler), workers)
        _replace(part, "batch_sampler", BatchSampler(sampler, loader.batch_size, loader.drop_last))
    return part


def _replace(loader: DataLoader[Any], name: str, value: object) -> None:
    """Set an attribute that a loader protects, before the loader's first use."""
    object.__setattr__(loader, name, value)


def _require_batch(loader: DataLoader[Any], part: int, workers: int) -> None:
    """Raise `ConfigurationError` if a loader that yields batches would yield none to each worker."""
    size, samples = loader.batch_size or 1, len(loader.dataset)  # type: ignore[arg-type]
    if loader.drop_last and part < size <= samples:
        raise ConfigurationError(
            f"each of {workers} workers gets only {part} of the {samples} samples, which is less than a batch of "
            f"{size}, and drop_last=True drops incomplete batches, so no worker would train; use smaller batches, "
            "fewer workers, or drop_last=False"
        )


def _require_plain(loader: DataLoader[Any]) -> None:
    """Raise `ConfigurationError` unless the loader's sampler draws every sample once, in order or shuffled."""
    sampler: Any = loader.sampler
    kind, samples = type(sampler), len(loader.dataset)  # type: ignore[arg-type]
    if kind is SequentialSampler or (kind is RandomSampler and not sampler.replacement and len(sampler) == samples):
        return
    raise ConfigurationError(
        f"the loader must have no custom sampler, got a {kind.__name__}; leave the sampler out and let "
        "flockstep.shard split the data, pass batch_sampler=BatchSampler(sampler, …) to have its batches split, or "
        "make the sampler depend on flockstep.rank() and do not call flockstep.shard"
    )
