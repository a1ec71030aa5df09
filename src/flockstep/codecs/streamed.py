"""The base class of codecs that send indices and values, or the uncompressed array where it takes no more bytes."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from flockstep.arrays import kernels
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.errors import Diverged, ProtocolError

Indices = Any
"""Ascending indices: uint32 in numpy, int64 in torch, which accepts no other index type."""


def plain_bytes(size: int, dtype: str) -> int:
    """Return the number of bytes of the uncompressed array."""
    return size * kernels.numpy_dtype(dtype).itemsize


def refuse(codec: Codec, value: float, place: int) -> Diverged:
    """Return the error to raise for an array with a NaN or an infinity."""
    return Diverged(
        f"cannot encode {value} at element {place} with {codec}; lower the learning rate or clip the gradient"
    )


class Streamed(Codec):
    """Decodes an array from indices and values. A payload as long as the array is the uncompressed array itself."""

    @abstractmethod
    def read(self, data: Bytes, size: int, dtype: str) -> tuple[Indices, FlatArray]:
        """Return the indices and values that an encoding contains; `data` is never the uncompressed array.

        Raises:
            ProtocolError: `data` cannot be the encoding of `size` elements.
        """

    sparse = True

    def is_plain(self, data: Bytes, size: int, dtype: str) -> bool:
        """Return whether `data` is the uncompressed array."""
        plain = plain_bytes(size, dtype)
        return len(data) == plain and (not self.exact_size or self.wire_bytes(size, dtype) == plain)

    def stream(self, data: Bytes, size: int, dtype: str) -> tuple[Indices, FlatArray]:
        """Return the ascending indices and the values of the elements that were sent.

        Raises:
            ProtocolError: `decode` would refuse `data`.
        """
        k, most = kernels.of(data), self.wire_bytes(size, dtype)
        if self.is_plain(data, size, dtype):
            return k.all_indices(data, size), k.from_bytes(data, dtype)
        if len(data) > most:
            raise ProtocolError(f"{self} takes at most {most} bytes for {size} elements of {dtype}, got {len(data)}")
        return self.read(data, size, dtype)

    def decode(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        """Return the sent elements at their positions, and zeros elsewhere.

        Raises:
            ProtocolError: indices do not ascend or exceed the array, or lengths do not match.
        """
        k = kernels.of(data)
        if self.is_plain(data, size, dtype):
            plain: FlatArray = k.from_bytes(data, dtype)
            return plain
        scattered: FlatArray = k.scattered(*self.stream(data, size, dtype), size)
        return scattered

    def add_decoded(self, data: Bytes, out: FlatArray, scale: float = 1.0) -> None:
        """Add `scale` times the sent elements to `out`; the other elements of `out` are not touched."""
        k, dtype = kernels.of(out), kernels.name_of(out)
        if self.is_plain(data, len(out), dtype):
            super().add_decoded(data, out, scale)
        else:
            k.scatter_add(out, *self.stream(data, len(out), dtype), scale)
