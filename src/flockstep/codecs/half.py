"""Half: every element as a 16-bit float."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flockstep.arrays import kernels
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.codecs.quantiser import LARGEST, computed_in
from flockstep.errors import ProtocolError


@dataclass(frozen=True)
class Half(Codec):
    """Round to the nearest IEEE float16: 2 bytes an element, 11 significant bits.

    Finite values beyond ±65504 become ±65504; infinities and NaN stay what they are. Magnitudes below 2⁻²⁵ become zero.
    Rounding is deterministic, hence biased. It contracts any array of d elements whose largest magnitude lies
    in [2⁻²⁴, 65504], by delta ≥ 8/(9d); what falls outside that range, residual feedback keeps and sends later. Arrays
    of float16 travel as they are.
    """

    @property
    def contraction(self) -> bool:
        """Of what lies in its range."""
        return True

    def wire_bytes(self, size: int, dtype: str) -> int:
        """Two bytes an element."""
        return 2 * size

    def encode(self, array: FlatArray, random: np.random.Generator) -> Bytes:
        """The rounded elements, little-endian."""
        k = kernels.of(array)
        if kernels.name_of(array) == "float16":
            whole: Bytes = k.as_bytes(k.copied(array))
            return whole
        data: Bytes = k.as_bytes(k.narrowed(k.as_floats(array), "float16", LARGEST["float16"]))
        return data

    def decode(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        """The rounded elements, as `dtype`.

        Raises:
            ProtocolError: the number of bytes is not that of `size` elements.
        """
        k = kernels.of(data)
        array: FlatArray = k.widened(self._halves(data, size), dtype)
        return array

    def add_decoded(self, data: Bytes, out: FlatArray, scale: float = 1.0) -> None:
        """out += scale * decode(data), in one pass.

        Raises:
            ProtocolError: as of `decode`.
        """
        if not computed_in(out):
            super().add_decoded(data, out, scale)
            return
        kernels.of(out).add_widened(self._halves(data, len(out)), out, scale)

    def encode_residual(self, array: FlatArray, error: FlatArray, random: np.random.Generator) -> Bytes:
        """The rounded elements of `error + array`; `error` becomes what rounding left."""
        error += array.reshape(-1)
        data = self.encode(error, random)
        self.add_decoded(data, error, -1.0)
        return data

    def _halves(self, data: Bytes, size: int) -> FlatArray:
        if len(data) != 2 * size:
            raise ProtocolError(f"half needs {2 * size} bytes for {size} elements, got {len(data)}")
        halves: FlatArray = kernels.of(data).from_bytes(data, "float16")
        return halves

    def error_bound(self, array: FlatArray) -> float:
        """Half a unit in the last place of each element: 2⁻¹¹ of it, at least 2⁻²⁵; what is cut off beyond ±65504."""
        x = np.abs(array.astype(np.float64))
        off = np.maximum(np.maximum(x * 2.0**-11, 2.0**-25), x - LARGEST["float16"])
        return float(np.sum(np.square(off)))
