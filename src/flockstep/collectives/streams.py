"""Sparse vectors in a sum: (index, value) pairs, as long as the dense array is not smaller."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.arrays import kernels
from flockstep.arrays.kernels import name_of, numpy_dtype
from flockstep.arrays.namespace import copied, namespace
from flockstep.arrays.schema import FlatArray
from flockstep.errors import ProtocolError

INDEX_BYTES = 4


def threshold(size: int, value_bytes: int) -> float:
    """Return δ = N s_v / (s_i + s_v), the number of non-zero elements above which the dense array of N elements is
    smaller.
    """
    return size * value_bytes / (INDEX_BYTES + value_bytes)


@dataclass
class Stream:
    """A vector of `size` elements: (index, value) pairs in ascending order of index or, with more than δ non-zero
    elements, a dense array.
    """

    size: int
    values: FlatArray
    indices: FlatArray | None

    @classmethod
    def of(cls, size: int, values: FlatArray, indices: FlatArray) -> Stream:
        """Return the vector with the given values at the given indices, dense if there are more than δ of them; a
        negative zero becomes zero, as in dense sums.
        """
        values = copied(values)
        values += 0.0  # in place, because numpy would widen bfloat16
        sparse = cls(size, values, indices)
        return sparse if len(values) <= threshold(size, values.itemsize) else cls(size, sparse.dense(), None)

    @classmethod
    def arrived(cls, payload: FlatArray, size: int, dtype: str) -> Stream:
        """Return the vector that a received `payload` encodes (see `wire`).

        Raises:
            ProtocolError: the payload cannot be a stream of that size.
        """
        k, itemsize = kernels.of(payload), numpy_dtype(dtype).itemsize
        if name_of(payload) == dtype and payload.shape == (size,):
            return cls(size, payload, None)
        count, rest = divmod(payload.nbytes, INDEX_BYTES + itemsize)
        if name_of(payload) != "uint8" or payload.ndim != 1 or rest:
            raise ProtocolError(
                f"{payload.nbytes} bytes of {payload.dtype} cannot be a stream of {size} elements of {dtype}"
            )
        indices = k.indices_from(payload[: INDEX_BYTES * count])
        if not k.ascending(indices, size):
            raise ProtocolError(f"the indices of a stream must be in ascending order and less than {size}")
        return cls(size, k.from_bytes(payload[INDEX_BYTES * count :], dtype), indices)

    @property
    def wire(self) -> FlatArray:
        """Return the array to send: the dense array, or all indices followed by all values, nnz (s_i + s_v) bytes."""
        if self.indices is None:
            return self.values
        k = kernels.of(self.values)
        wire: FlatArray = k.join(k.index_bytes(self.indices), k.as_bytes(self.values))
        return wire

    def dense(self) -> FlatArray:
        """Return the vector as a dense array of shape (size,)."""
        if self.indices is None:
            return self.values
        whole: FlatArray = kernels.of(self.values).scattered(self.indices, self.values, self.size)
        return whole

    def plus(self, other: Stream) -> Stream:
        """Return the sum of this vector and `other`; the sum is dense as soon as it has more than δ elements."""
        if self.indices is None:
            return Stream(self.size, self.values + other.dense(), None)
        if other.indices is None:
            return Stream(self.size, self.dense() + other.values, None)
        xp = namespace(self.values)
        indices = xp.unique(xp.concatenate([self.indices, other.indices]))
        values = kernels.of(self.values).scattered(xp.searchsorted(indices, self.indices), self.values, len(indices))
        values[xp.searchsorted(indices, other.indices)] += other.values
        return Stream.of(self.size, values, indices)

    def cut(self, part: slice) -> Stream:
        """Return the part of the vector in a slice, with indices counted from the start of the slice; the part is dense
        if it exceeds its own δ.
        """
        size = part.stop - part.start
        if self.indices is None:
            return Stream(size, self.values[part], None)
        first, last = (int(namespace(self.indices).searchsorted(self.indices, end)) for end in (part.start, part.stop))
        return Stream.of(size, self.values[first:last], self.indices[first:last] - part.start)
