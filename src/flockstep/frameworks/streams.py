"""Samples that are read when they are needed: data sets, loaders and iterables instead of arrays."""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from flockstep.arrays.namespace import is_tensor, to_host
from flockstep.errors import ConfigurationError

AHEAD = 2
"""Number of batches that are read in advance, including the batch in use."""
MOST = 1_000_000
"""Largest number of samples of an iterable that are read into memory."""
TRIED, READINGS = 8, 4
"""TRIED: number of samples whose values are compared between readings. READINGS: number of readings of each."""


class SampleReader:
    """Reads the samples of a data set, with the next batch in advance. Only one thread calls the data set."""

    def __init__(self, samples: Any, name: str, collate: Callable[[list[Any]], Any] | None = None, digest: str = ""):
        """`samples` has `__len__` and `__getitem__`, which returns a pair (x, y); `collate` makes a batch of pairs;
        `digest`: of the samples in their order, if they were read from an iterable.
        """
        self._samples, self._name, self._collate, self.digest = samples, name, collate, digest
        self._thread: ThreadPoolExecutor | None = None
        self._pending: dict[bytes, Future[tuple[Any, Any]]] = {}
        self._last: tuple[bytes, tuple[Any, Any]] = (b"-", (None, None))
        self.size = len(samples)
        if not self.size:
            raise ConfigurationError(f"{name} must hold at least one sample, got none; check the source of the data")
        self._require_fixed()

    @property
    def labels(self) -> npt.NDArray[np.int64] | None:
        """Class of every sample, from the data set's attribute `targets`; None if it has no such attribute."""
        targets = getattr(self._samples, "targets", None)
        if targets is None:
            return None
        found = np.asarray(targets)
        return found.astype(np.int64) if found.shape == (self.size,) and found.dtype.kind in "iu" else None

    def prefetch(self, indices: npt.NDArray[np.int64]) -> None:
        """Start to read the batch of the given samples (B,) in advance."""
        key = indices.tobytes()
        if key != self._last[0] and key not in self._pending:
            self._pending[key] = self._submit(indices)
        while len(self._pending) > AHEAD:
            self._pending.pop(next(iter(self._pending))).cancel()

    def read(self, indices: npt.NDArray[np.int64]) -> tuple[Any, Any]:
        """Return the batch of the given samples (B,), as numpy arrays or tensors x (B, …) and y (B, …)."""
        key = indices.tobytes()
        if self._last[0] != key:
            self._last = key, (self._pending.pop(key, None) or self._submit(indices)).result()
        return self._last[1]

    def _submit(self, indices: npt.NDArray[np.int64]) -> Future[tuple[Any, Any]]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "flockstep-samples")
        return self._thread.submit(self._batch, indices.copy())

    def _batch(self, indices: npt.NDArray[np.int64]) -> tuple[Any, Any]:
        different, places = np.unique(indices, return_inverse=True)
        pairs = [self._samples[int(index)] for index in different]
        if self._collate is not None:
            x, y = self._collate([pairs[place] for place in places])
            return x, y
        xs, ys = zip(*pairs, strict=True)
        return self._stacked(xs, places), self._stacked(ys, places)

    def _stacked(self, values: Sequence[Any], places: npt.NDArray[np.intp]) -> Any:
        tensors = is_tensor(values[0])
        parts = values if tensors else [np.asarray(value) for value in values]
        shapes = {tuple(part.shape) for part in parts}
        if len(shapes) > 1:
            one, other, *_ = sorted(shapes)
            raise ConfigurationError(
                f"samples of {self._name} must have one shape, got {one} and {other}; let the data set pad, crop or "
                "resize them"
            )
        ordered = [parts[place] for place in places]
        return sys.modules["torch"].stack(ordered) if tensors else np.stack(ordered)

    def _require_fixed(self) -> None:
        """Refuse what is no pair, and what draws random numbers: a run in virtual time reads in another order."""
        first = self._samples[0]
        if not isinstance(first, (tuple, list)) or len(first) != 2:
            raise ConfigurationError(
                f"a sample of {self._name} must be a pair (x, y), got {type(first).__name__}; return one, or name the "
                'columns as flockstep.workloads.readers.columns(samples, x="…", y="…")'
            )
        for index in np.unique(np.linspace(0, self.size - 1, TRIED, dtype=np.int64)):
            first, *others = (list(map(np.asarray, self._batch(index[None]))) for _ in range(READINGS))
            same = (
                np.array_equal(a, b, equal_nan=a.dtype.kind in "fc" and b.dtype.kind in "fc")
                for other in others
                for a, b in zip(first, other, strict=True)
            )
            if not all(same):
                raise ConfigurationError(
                    f"sample {index} of {self._name} differs each time it is read, so that no run could be repeated; "
                    f"draw random changes in the model's forward(), where they depend on seed, worker and "
                    "step"
                )


class SampleColumn:
    """The inputs or the targets of samples that are read when they are needed. The object is used like an array."""

    def __init__(self, reader: SampleReader, which: int, convert: Callable[[Any], Any] = lambda values: values):
        self.reader, self._which, self._convert = reader, which, convert
        first = self[np.zeros(1, np.int64)]
        self.dtype, self.ndim = first.dtype, first.ndim

    def __len__(self) -> int:
        return self.reader.size

    def __getitem__(self, chosen: Any) -> Any:
        """The samples of a slice, or of indices of any shape."""
        if isinstance(chosen, slice):
            chosen = np.arange(*chosen.indices(len(self)))
        indices = np.asarray(chosen, np.int64)
        values = self._convert(self.reader.read(indices.reshape(-1))[self._which])
        return values.reshape(*indices.shape, *values.shape[1:])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.asarray(self[:], dtype)

    def index_select(self, axis: int, indices: Any) -> Any:
        """Return the samples with the indices `indices` (B,)."""
        assert axis == 0
        return self[indices]

    def dim(self) -> int:
        """Return the number of axes of the column, as of a tensor."""
        return int(self.ndim)

    def numpy(self) -> npt.NDArray[np.int64] | None:
        """Return the class of every sample as an array; None if the data set has no attribute `targets`."""
        return self.reader.labels

    def mapped(self, convert: Callable[[Any], Any]) -> SampleColumn:
        """Return a column like this column, whose batches are transformed by `convert`."""
        return SampleColumn(self.reader, self._which, lambda values: convert(self._convert(values)))


def _array_of(part: Any) -> npt.NDArray[Any]:
    """A part of a sample as an array; an array of objects if it is none."""
    if is_tensor(part):
        return np.ascontiguousarray(to_host(part))
    try:
        return np.ascontiguousarray(part)
    except ValueError:  # lists of several lengths
        return np.empty(1, object)


def labels_of(column: Any) -> npt.NDArray[np.int64] | None:
    """Return the class of every sample, from an array of targets or the data set's `targets`; None without."""
    return column.reader.labels if isinstance(column, SampleColumn) else column


def columns_of(samples: Any, name: str) -> tuple[Any, Any]:
    """Return inputs and targets of a pair of arrays, a data set, a DataLoader, or an iterable of pairs (x, y)."""
    if isinstance(samples, tuple) and len(samples) == 2 and all(hasattr(one, "shape") for one in samples):
        return samples
    collate, digest = None, ""
    if (loading := sys.modules.get("torch.utils.data")) is not None:
        if isinstance(samples, loading.DataLoader):
            _require_plain(samples, loading, name)
            samples, collate = samples.dataset, samples.collate_fn
        if isinstance(samples, loading.IterableDataset):
            samples, digest = _read(iter(samples), name)
    if not (hasattr(samples, "__getitem__") and hasattr(samples, "__len__")):
        if not isinstance(samples, Iterable):
            raise ConfigurationError(
                f"{name} must be a pair of arrays, a data set with __len__ and __getitem__, a DataLoader or an "
                f"iterable of pairs (x, y), got {type(samples).__name__}; give one of these"
            )
        samples, digest = _read(samples, name)
    reader = SampleReader(samples, name, collate, digest)
    return SampleColumn(reader, 0), SampleColumn(reader, 1)


def _read(samples: Iterable[Any], name: str) -> tuple[list[Any], str]:
    """All samples of an iterable, which must end: workers draw samples by number; and a digest of them."""
    found = list(itertools.islice(samples, MOST + 1))
    if len(found) > MOST:
        raise ConfigurationError(
            f"{name} is an iterable of more than {MOST} samples, which cannot be counted or divided; give a data set "
            "with __len__ and __getitem__, or cut it with itertools.islice"
        )
    digest = hashlib.sha256()
    for sample in found:
        for part in sample if isinstance(sample, (tuple, list)) else ():
            values = _array_of(part)
            digest.update(f"{values.shape} {values.dtype}".encode())
            digest.update(b"" if values.dtype.hasobject else values.tobytes())
    return found, digest.hexdigest()[:16]


def _require_plain(loader: Any, loading: Any, name: str) -> None:
    """Raise `ConfigurationError` if a loader draws samples by rules of its own, which the run would not follow."""
    if isinstance(loader.dataset, loading.IterableDataset):
        return
    sampler = loader.sampler
    plain = type(sampler) is loading.SequentialSampler or (
        type(sampler) is loading.RandomSampler and not sampler.replacement and len(sampler) == len(loader.dataset)
    )
    if not plain or loader.batch_size is None or type(loader.batch_sampler) is not loading.BatchSampler:
        raise ConfigurationError(
            f"the loader of {name} has a {type(sampler).__name__} or makes its own batches, but a job draws the "
            f"batches from each worker's part; give loader.dataset, and batch=… to the Job"
        )
