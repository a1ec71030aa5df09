"""Each worker's part of a PyTorch data loader."""

from __future__ import annotations

import copy
import hashlib
import random
import weakref
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)
from torch.utils.data.distributed import DistributedSampler

from flockstep.errors import ConfigurationError
from flockstep.runtime.epochs import EpochCount, ShardedBatches, count_of, digest_of, place_of_pass, tell_data

B = TypeVar("B")


class _EveryNth(ShardedBatches[Any]):
    """Every n-th index, or batch of indices, of a sampler, for a part's loader, which counts the epochs."""

    certain = True
    _seed = 0

    def __init__(self, sampler: Any, rank: int, workers: int, epochs: EpochCount, what: str):
        super().__init__(sampler, rank, workers, epochs)
        self.what = what

    def set_epoch(self, epoch: int) -> None:
        """Set the seed of the next order, in which this worker has its present place in the run."""
        self._rank, self._workers = place_of_pass(self._rank, self._workers)
        self._seed = epoch

    def __iter__(self) -> Iterator[Any]:
        return self.in_order(self._seed)


class _Samples(DistributedSampler[Any]):
    """This worker's samples of a data set, of which every sample is drawn once in an epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Set the seed of the next order, in which this worker has its present place in the run."""
        place = place_of_pass(self.rank, self.num_replicas)
        if place != (self.rank, self.num_replicas):
            DistributedSampler.__init__(self, self.dataset, place[1], place[0], self.shuffle, drop_last=self.drop_last)
        super().set_epoch(epoch)


class _Part:
    """A worker's part of a data loader, which has the class of the loader beside this one."""

    _epochs: EpochCount
    _order: _Samples | _EveryNth
    """Selects this worker's indices, or batches of indices."""
    _identity: str
    """Description of the data set, equal on all workers."""
    _samples = ""
    """Digest of some samples; empty if they may differ between workers."""

    def __iter__(self) -> Iterator[Any]:
        return self._epochs.counted(self._of_epoch)

    def _of_epoch(self, epoch: int) -> Iterator[Any]:
        seed, shuffles = self._epochs.seed + epoch, getattr(self._order, "shuffle", True)
        self._order.set_epoch(seed)
        tell_data(self._epochs.number, "data", self._identity, certain=True)
        tell_data(self._epochs.number, "order", f"{self._samples} {seed if shuffles else ''}", certain=False)
        return super().__iter__()  # type: ignore[misc,no-any-return]


_parts: weakref.WeakKeyDictionary[DataLoader[Any], Any] = weakref.WeakKeyDictionary()
"""Loader → its part: epochs are counted, and persistent workers survive, across calls of `shard`."""


def split(loader: DataLoader[B], rank: int, workers: int) -> Any:
    """Return this worker's part of a data loader; each call with the same loader returns the same object. Raise
    `ConfigurationError` if the loader's sampler already divides the samples among workers, or a worker would get no
    batch.
    """
    if loader not in _parts:
        _parts[loader] = _split(loader, rank, workers)
    return _parts[loader]


def _split(loader: DataLoader[B], rank: int, workers: int) -> Any:
    """A copy of the loader with all its settings, over this worker's part alone."""
    copied = copy.copy(loader)
    _replace(copied, "_iterator", None)  # worker processes of a loader in use would continue with all samples
    if isinstance(loader.dataset, IterableDataset):
        return ShardedBatches(copied, rank, workers, count_of(copied))
    part: Any = object.__new__(type(type(loader).__name__, (_Part, type(loader)), {}))
    vars(part).update(vars(copied))
    part._identity = identity(loader.dataset)
    part._epochs = count_of(part, part._identity)
    batches: Any = loader.batch_sampler
    sampler: Any = loader.sampler if loader.batch_size is not None or batches is None else batches
    for each in (sampler, getattr(sampler, "sampler", None)):
        if isinstance(each, DistributedSampler):
            raise ConfigurationError(
                f"the loader's {type(each).__name__} divides the samples among workers already, and flockstep.shard "
                "would divide each part again; leave the sampler out, or leave flockstep.shard out"
            )
    if sampler is batches:
        part._order = _EveryNth(batches, rank, workers, part._epochs, "batches")
        _replace(part, "batch_sampler", part._order)
        return part
    if _is_plain(loader):
        shuffled = isinstance(sampler, RandomSampler)
        part._order = _Samples(loader.dataset, workers, rank, shuffle=shuffled, drop_last=loader.drop_last)
        if loader.num_workers == 0:  # what a process of the loader opens may not be opened here before
            part._samples = sampled(loader.dataset)
        _require_batch(loader, len(part._order), workers)
    else:
        part._order = _EveryNth(sampler, rank, workers, part._epochs, "samples")
    _replace(part, "sampler", part._order)
    if loader.batch_size is not None:
        _replace(part, "batch_sampler", BatchSampler(part._order, loader.batch_size, loader.drop_last))
    return part


def _replace(loader: DataLoader[Any], name: str, value: object) -> None:
    """Set an attribute that a loader protects, before the loader's first use."""
    object.__setattr__(loader, name, value)


def _require_batch(loader: DataLoader[Any], part: int, workers: int) -> None:
    """Raise `ConfigurationError` if a loader that yields batches would yield none to each worker."""
    size, samples = loader.batch_size or 1, len(loader.dataset)  # type: ignore[arg-type]
    if loader.batch_size is not None and loader.drop_last and part < size <= samples:
        raise ConfigurationError(
            f"each of {workers} workers gets only {part} of the {samples} samples, which is less than a batch of "
            f"{size}, and drop_last=True drops incomplete batches, so no worker would train; use smaller batches, "
            "fewer workers, or drop_last=False"
        )


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Whether the loader's sampler draws every sample once, in order or shuffled."""
    sampler: Any = loader.sampler
    kind, samples = type(sampler), len(loader.dataset)  # type: ignore[arg-type]
    return kind is SequentialSampler or (kind is RandomSampler and not sampler.replacement and len(sampler) == samples)


def identity(data: Any) -> str:
    """Number of samples of a data set, with a digest of what identifies them in torch's own classes of data sets."""
    digest = hashlib.sha256()
    _identify(digest, data)
    return f"{_size(data)} samples (digest {digest.hexdigest()[:8]})"


def _size(data: Any) -> int | str:
    return len(data) if hasattr(data, "__len__") else "any number of"


def _identify(digest: Any, data: Any) -> None:
    digest.update(f"{type(data).__name__} {_size(data)}".encode())
    if isinstance(data, Subset):
        digest.update(np.asarray(data.indices).tobytes())
        _identify(digest, data.dataset)
    elif isinstance(data, ConcatDataset):
        for one in data.datasets:
            _identify(digest, one)
    elif isinstance(data, TensorDataset):
        digest.update(digest_of([tensor[:: max(1, len(tensor) - 1)] for tensor in data.tensors]).encode())


def sampled(data: Any) -> str:
    """Digest of the first and the last sample, read with equal random streams; empty if readings differ."""
    if not len(data):
        return ""
    one, other = (digest_of([_read(data, index) for index in (0, len(data) - 1)]) for _ in range(2))
    return one if one == other else ""


def _read(data: Any, index: int) -> Any:
    """Read a sample with global random streams that are equal on all workers; afterwards they are as before."""
    kept = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002 - the stream of scripts
    torch.default_generator.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)
    try:
        return data[index]
    finally:
        torch.set_rng_state(kept[0])
        np.random.set_state(kept[1])  # noqa: NPY002
        random.setstate(kept[2])
