"""Sparse vectors on their way through a sum: index and value pairs, until the dense form is smaller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flockstep.arrays.kernels import numpy_dtype
from flockstep.arrays.schema import FlatArray
from flockstep.errors import ProtocolError

INDEX_BYTES = 4


def threshold(size: int, value_bytes: int) -> float:
    """δ = N s_v / (s_i + s_v): with more non-zero elements than that the dense form of N is smaller."""
    return size * value_bytes / (INDEX_BYTES + value_bytes)


@dataclass
class Stream:
    """A vector of `size`: pairs in ascending order of index, or, with more than δ of them, dense: then no `indices`."""

    size: int
    values: FlatArray
    indices: FlatArray | None

    @classmethod
    def of(cls, size: int, values: FlatArray, indices: FlatArray) -> Stream:
        """Those elements; dense if they are more than δ. A negative zero becomes zero, as it does in a dense sum."""
        values = values + values.dtype.type(0)
        sparse = cls(size, values, indices.astype(np.uint32, copy=False))
        return sparse if len(values) <= threshold(size, values.itemsize) else cls(size, sparse.dense(), None)

    @classmethod
    def arrived(cls, payload: FlatArray, size: int, dtype: str) -> Stream:
        """What `wire` made.

        Raises:
            ProtocolError: it cannot be a stream of that size.
        """
        kind = numpy_dtype(dtype)
        if payload.dtype == kind and payload.shape == (size,):
            return cls(size, payload, None)
        count, rest = divmod(payload.nbytes, INDEX_BYTES + kind.itemsize)
        if payload.dtype != np.uint8 or payload.ndim != 1 or rest:
            raise ProtocolError(f"no stream of {size} {dtype} has {payload.nbytes} bytes of {payload.dtype}")
        indices = payload[: INDEX_BYTES * count].view("<u4")
        if count and (indices[-1] >= size or not (indices[1:] > indices[:-1]).all()):
            raise ProtocolError(f"the indices of a stream must ascend and be less than {size}")
        return cls(size, _values(payload[INDEX_BYTES * count :], kind), indices)

    @property
    def wire(self) -> FlatArray:
        """What travels: the dense array, or bytes, all indices before all values: nnz (s_i + s_v) of them."""
        if self.indices is None:
            return self.values
        pieces = self.indices.astype("<u4").view(np.uint8), np.ascontiguousarray(self.values).view(np.uint8)
        return np.concatenate(pieces)

    def dense(self) -> FlatArray:
        """The whole vector."""
        if self.indices is None:
            return self.values
        whole: FlatArray = np.zeros(self.size, self.values.dtype)
        whole[self.indices] = self.values
        return whole

    def plus(self, other: Stream) -> Stream:
        """The sum, in which this one's elements come first; dense as soon as it has more than δ elements."""
        if self.indices is None:
            return Stream(self.size, self.values + other.dense(), None)
        if other.indices is None:
            return Stream(self.size, self.dense() + other.values, None)
        indices = np.union1d(self.indices, other.indices)
        values: FlatArray = np.zeros(len(indices), self.values.dtype)
        values[np.searchsorted(indices, self.indices)] = self.values
        values[np.searchsorted(indices, other.indices)] += other.values
        return Stream.of(self.size, values, indices)

    def cut(self, part: slice) -> Stream:
        """The elements of that part, counted from its start; switches to dense by the part's own δ."""
        size = part.stop - part.start
        if self.indices is None:
            return Stream(size, self.values[part], None)
        first, last = np.searchsorted(self.indices, [part.start, part.stop])
        return Stream.of(size, self.values[first:last], self.indices[first:last] - np.uint32(part.start))


def _values(data: FlatArray, kind: np.dtype[Any]) -> FlatArray:
    """Bytes as elements."""
    values: FlatArray = data.view(kind)
    return values
