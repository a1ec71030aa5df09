"""The base of codecs that round every element to a float of two bytes."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from flockstep.arrays import kernels
from flockstep.arrays.namespace import copied
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.codecs.quantizer import LARGEST, computed_in
from flockstep.errors import ProtocolError


class Rounded(Codec):
    """Rounds every element to the nearest float of `form`; arrays of dtypes in `whole` are sent unchanged."""

    form: ClassVar[str]
    """The dtype that elements are rounded to: float16 or bfloat16."""
    whole: ClassVar[tuple[str, ...]]
    """Names of dtypes with two bytes per element, whose arrays are sent unchanged."""

    contraction = True
    """The codec is a contraction for arrays within the range of `form`."""

    def wire_bytes(self, size: int, dtype: str) -> int:
        return 2 * size

    def encode(self, array: FlatArray, random: np.random.Generator) -> Bytes:
        """Return the elements rounded to `form`, as little-endian bytes."""
        k = kernels.of(array)
        if kernels.name_of(array) in self.whole:
            unchanged: Bytes = k.as_bytes(copied(array.reshape(-1)))
            return unchanged
        data: Bytes = k.as_bytes(k.narrowed(k.as_floats(array), self.form, LARGEST[self.form]))
        return data

    def decode(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        """Return the array of dtype `dtype` with the rounded elements in `data`.

        Raises:
            ProtocolError: the number of bytes is wrong for `size` elements.
        """
        array: FlatArray = kernels.of(data).widened(self._rounded(data, size, dtype), dtype)
        return array

    def add_decoded(self, data: Bytes, out: FlatArray, scale: float = 1.0) -> None:
        """Add scale * decode(data) to `out`, in one pass.

        Raises:
            ProtocolError: `decode` would refuse `data`.
        """
        if not computed_in(out):
            super().add_decoded(data, out, scale)
            return
        kernels.of(out).add_widened(self._rounded(data, len(out), kernels.name_of(out)), out, scale)

    def _rounded(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        if len(data) != 2 * size:
            raise ProtocolError(f"{self} needs {2 * size} bytes for {size} elements, got {len(data)}")
        rounded: FlatArray = kernels.of(data).from_bytes(data, dtype if dtype in self.whole else self.form)
        return rounded
