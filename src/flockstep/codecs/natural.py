"""Natural compression: every element becomes one of the two nearest powers of two, chosen at random."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flockstep.arrays import kernels
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes
from flockstep.codecs.quantizer import Quantizer, scale_dtype

TOP = {"float32": 127, "float64": 1023}
"""Name of a dtype → exponent of the largest power of two that is sent."""


@dataclass(frozen=True)
class Natural(Quantizer):
    """Natural compression (Horváth et al. 2019, definition 2.1): x becomes sign(x) times one of the two powers of two
    next to |x|, chosen at random.

    Sign and exponent take 9 bits per element, 12 for float64. E||C(x) - x||² ≤ ||x||² / 8; powers of two and zero do
    not change. Magnitudes beyond 2^127 (2^1023 for float64) become that power, and subnormal magnitudes become zero or
    the smallest normal number. The random bits have a resolution of 2⁻²³.
    """

    unbiased = True
    """The codec is unbiased for magnitudes up to the largest power of two."""

    contraction = True
    """The codec is a contraction with delta = 7/8."""

    def coded_bytes(self, size: int, dtype: str) -> int:
        return size + (size * (4 if dtype == "float64" else 1) + 7) // 8

    def _top(self, dtype: str) -> int:
        return 2 * TOP[dtype]  # as the biased exponent field, exponent plus TOP

    def coded(self, floats: FlatArray, random: np.random.Generator) -> Bytes:
        """Return the encoding: the low 8 bits of all exponents, then the remaining exponent bits with the signs."""
        k = kernels.of(floats)
        low, high, finite = k.to_powers(floats, self._top(kernels.name_of(floats)), kernels.seed_from(random))
        self.refuse(floats, not finite)
        data: Bytes = k.join(low, high)
        return data

    def uncoded(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        array, top = kernels.of(data).from_powers(data[:size], data[size:], dtype)
        self.require(top <= self._top(dtype), size, dtype)
        decoded: FlatArray = array
        return decoded

    def add_uncoded(self, data: Bytes, out: FlatArray, scale: float) -> None:
        size, dtype = len(out), kernels.name_of(out)
        top = kernels.of(data).add_powers(data[:size], data[size:], out, scale)
        self.require(top <= self._top(dtype), size, dtype)

    def variance(self, size: int) -> float | None:
        """Return the variance omega = 1/8, for arrays of any size."""
        return 1 / 8

    def error_bound(self, array: FlatArray) -> float:
        """Return an upper bound on the expected squared error, summed over the elements x.

        With the smallest normal number m and the largest power of two M, an element adds m |x| if |x| < m, (|x| - M)²
        if |x| > M, and x² / 8 otherwise. The bound is 0 for an array that is sent unchanged.
        """
        dtype = array.dtype.name
        if self.as_it_is(array.size, dtype):
            return 0.0
        x = np.abs(array.reshape(-1).astype(np.float64))
        least = 2.0 ** (-1022 if dtype == "float64" else -126)
        top = 2.0 ** TOP[scale_dtype(dtype)]
        bound = np.where(x < least, x * least, np.square(np.where(x > top, x - top, x * 8**-0.5)))
        return float(np.sum(bound))
