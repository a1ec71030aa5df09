"""Identity: sends the array's own bytes, without compression."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flockstep.arrays import kernels
from flockstep.arrays.namespace import copied
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.errors import ProtocolError


@dataclass(frozen=True)
class Identity(Codec):
    """The array's elements unchanged, little-endian: no compression."""

    lossless = True

    unbiased = True

    linear = True

    contraction = True

    def wire_bytes(self, size: int, dtype: str) -> int:
        return size * kernels.numpy_dtype(dtype).itemsize

    def encode(self, array: FlatArray, random: np.random.Generator) -> Bytes:
        """Return a copy of the array's bytes."""
        k = kernels.of(array)
        data: Bytes = k.as_bytes(copied(array.reshape(-1)))
        if isinstance(data, np.ndarray):
            data.flags.writeable = False  # so that sending it needs no other copy
        return data

    def decode(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        """Return the array in `data`; it may share memory with `data`.

        Raises:
            ProtocolError: the number of bytes is wrong for `size` elements.
        """
        if len(data) != self.wire_bytes(size, dtype):
            raise ProtocolError(
                f"identity needs {self.wire_bytes(size, dtype)} bytes for {size} elements of {dtype}, got {len(data)}"
            )
        array: FlatArray = kernels.of(data).from_bytes(data, dtype)
        return array

    def terms(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        """Return the whole encoding as an array, because encodings may be added element by element."""
        return self.decode(data, size, dtype)

    def error_bound(self, array: FlatArray) -> float:
        return 0.0
