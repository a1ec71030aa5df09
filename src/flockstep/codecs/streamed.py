"""What codecs that send indices and values have in common: the array itself where they would not be smaller."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from flockstep.arrays import kernels
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.errors import Diverged, ProtocolError

Indices = Any
"""Ascending: uint32 in numpy, int64 in torch, which indexes with nothing else."""


def plain_bytes(size: int, dtype: str) -> int:
    """Of the array itself."""
    return size * kernels.numpy_dtype(dtype).itemsize


def refuse(codec: Codec, value: float, place: int) -> Diverged:
    """The error for a NaN or an infinity."""
    return Diverged(
        f"cannot encode {value} at element {place} with {codec}; lower the learning rate or clip the gradient"
    )


class Streamed(Codec):
    """Decodes by way of its indices and values, unless the bytes are as many as the array has: then they are it."""

    @abstractmethod
    def read(self, data: Bytes, size: int, dtype: str) -> tuple[Indices, FlatArray]:
        """The indices and values of an encoding that is not the array itself, and not longer.

        Raises:
            ProtocolError: it cannot be one for `size` elements.
        """

    sparse = True
    """Most elements are zero."""

    def is_plain(self, data: Bytes, size: int, dtype: str) -> bool:
        """Whether `data` are the bytes of the array itself."""
        plain = plain_bytes(size, dtype)
        return len(data) == plain and (not self.exact_size or self.wire_bytes(size, dtype) == plain)

    def stream(self, data: Bytes, size: int, dtype: str) -> tuple[Indices, FlatArray]:
        """Ascending indices and values of what was sent.

        Raises:
            ProtocolError: as of `decode`.
        """
        k, most = kernels.of(data), self.wire_bytes(size, dtype)
        if self.is_plain(data, size, dtype):
            return k.all_indices(data, size), k.from_bytes(data, dtype)
        if len(data) > most:
            raise ProtocolError(f"{self} takes at most {most} bytes for {size} {dtype}, got {len(data)}")
        return self.read(data, size, dtype)

    def decode(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        """What was sent where it belongs, zero elsewhere.

        Raises:
            ProtocolError: indices do not ascend or reach beyond the array, or lengths do not fit.
        """
        k = kernels.of(data)
        if self.is_plain(data, size, dtype):
            plain: FlatArray = k.from_bytes(data, dtype)
            return plain
        scattered: FlatArray = k.scattered(*self.stream(data, size, dtype), size)
        return scattered

    def add_decoded(self, data: Bytes, out: FlatArray, scale: float = 1.0) -> None:
        """out += scale * decode(data), only where something was sent."""
        k, dtype = kernels.of(out), kernels.name_of(out)
        if self.is_plain(data, len(out), dtype):
            super().add_decoded(data, out, scale)
        else:
            k.scatter_add(out, *self.stream(data, len(out), dtype), scale)
