"""bfloat16: every element as a float with 8 bits of exponent and 7 of fraction."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flockstep.arrays import kernels
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.codecs.quantiser import LARGEST, computed_in
from flockstep.errors import ProtocolError


@dataclass(frozen=True)
class Bfloat16(Codec):
    """Round to the nearest bfloat16, ties to even: 2 bytes an element, 8 significant bits, the range of float32.

    Finite values beyond ±3.39e38 become that; infinities and NaN stay. float64 is rounded to float32 on the way. Arrays
    of float16 and bfloat16, which have 2 bytes already, travel as they are.
    """

    @property
    def contraction(self) -> bool:
        """By 1 - 2⁻¹⁶, of what lies in the range of normal numbers."""
        return True

    def wire_bytes(self, size: int, dtype: str) -> int:
        """Two bytes an element."""
        return 2 * size

    def encode(self, array: FlatArray, random: np.random.Generator) -> Bytes:
        """The rounded elements, little-endian."""
        k = kernels.of(array)
        if kernels.name_of(array) in LARGEST:
            whole: Bytes = k.as_bytes(k.copied(array))
            return whole
        data: Bytes = k.as_bytes(k.narrowed(k.as_floats(array), "bfloat16", LARGEST["bfloat16"]))
        return data

    def decode(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        """The rounded elements, as `dtype`.

        Raises:
            ProtocolError: the number of bytes is not that of `size` elements.
        """
        k = kernels.of(data)
        array: FlatArray = k.widened(self._rounded(data, size, dtype), dtype)
        return array

    def add_decoded(self, data: Bytes, out: FlatArray, scale: float = 1.0) -> None:
        """out += scale * decode(data), in one pass.

        Raises:
            ProtocolError: as of `decode`.
        """
        if not computed_in(out):
            super().add_decoded(data, out, scale)
            return
        k = kernels.of(out)
        k.add_widened(self._rounded(data, len(out), kernels.name_of(out)), out, scale)

    def encode_residual(self, array: FlatArray, error: FlatArray, random: np.random.Generator) -> Bytes:
        """The rounded elements of `error + array`; `error` becomes what rounding left."""
        error += array.reshape(-1)
        data = self.encode(error, random)
        self.add_decoded(data, error, -1.0)
        return data

    def _rounded(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        if len(data) != 2 * size:
            raise ProtocolError(f"bfloat16 needs {2 * size} bytes for {size} elements, got {len(data)}")
        rounded: FlatArray = kernels.of(data).from_bytes(data, dtype if dtype in LARGEST else "bfloat16")
        return rounded

    def error_bound(self, array: FlatArray) -> float:
        """Half a unit in the last place of each: 2⁻⁸ of it, at least 2⁻¹³⁴; what is cut off beyond the range."""
        if array.dtype.name in LARGEST:
            return 0.0
        x = np.abs(array.astype(np.float64))
        off = np.maximum(np.maximum(x * (2.0**-8 + 2.0**-23), 2.0**-133), x - LARGEST["bfloat16"])
        with np.errstate(over="ignore"):
            return float(np.sum(np.square(off)))
