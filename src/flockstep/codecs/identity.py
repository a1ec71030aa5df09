"""Identity: the array's own bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.errors import ProtocolError


@dataclass(frozen=True)
class Identity(Codec):
    """The elements as they are, little-endian: what travels when nothing is compressed."""

    @property
    def lossless(self) -> bool:
        """Nothing changes."""
        return True

    @property
    def unbiased(self) -> bool:
        """Nothing changes."""
        return True

    @property
    def linear(self) -> bool:
        """Sums are sums."""
        return True

    @property
    def contraction(self) -> bool:
        """Nothing is lost."""
        return True

    def wire_bytes(self, size: int, dtype: str) -> int:
        """The bytes of the array itself."""
        return size * np.dtype(dtype).itemsize

    def encode(self, array: FlatArray, random: np.random.Generator) -> Bytes:
        """A copy of the array's bytes."""
        copy = array.astype(array.dtype.newbyteorder("<"), order="C")
        copy.flags.writeable = False  # so that sending it needs no other copy
        return copy.view(np.uint8)

    def decode(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        """The array in `data`; may share its memory.

        Raises:
            ProtocolError: the number of bytes is not that of `size` elements.
        """
        if data.size != self.wire_bytes(size, dtype):
            raise ProtocolError(
                f"identity needs {self.wire_bytes(size, dtype)} bytes for {size} {dtype}, got {data.size}"
            )
        little = np.ascontiguousarray(data).view(np.dtype(dtype).newbyteorder("<"))
        return little.astype(dtype, copy=False)

    def add_decoded(self, data: Bytes, out: FlatArray, scale: float = 1.0) -> None:
        """out += scale * x, straight from the bytes."""
        decoded = self.decode(data, len(out), out.dtype.name)
        out += decoded if scale == 1 else decoded * decoded.dtype.type(scale)

    def terms(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        """All of it."""
        return self.decode(data, size, dtype)

    def error_bound(self, array: FlatArray) -> float:
        """None."""
        return 0.0
