"""8-bit floats: "OCP 8-bit Floating Point Specification (OFP8)", revision 1.0, 2023; Micikevicius et al., "FP8 Formats
for Deep Learning", 2022 (arXiv 2209.05433).

    E4M3 (float8_e4m3fn): bias 7; no infinities; S.1111.111 is NaN; largest 448; smallest normal 2^−6, subnormal 2^−9
    E5M2:                 bias 15; S.11111.00 is infinity, S.11111.{01,10,11} NaN; largest 57344; smallest 2^−14, 2^−16
    value of exponent field e and mantissa field m of M bits:  (1 + m/2^M) 2^(e − bias), or m/2^M 2^(1 − bias) if e = 0
    rounding: to nearest, ties to even
    too large after rounding:  saturating: ± largest;  otherwise: E5M2 ± infinity, E4M3 NaN
    infinities:                saturating: ± largest;  otherwise: E5M2 ± infinity, E4M3 NaN;   NaN stays NaN

Left open, and settled here:
* Which NaN: code 0x7F, without the source's sign. Compare NaNs as such.
* "Too large" is judged after rounding as if the exponent went on: E4M3 has its limit at 464, halfway to 480, and 464
  itself goes to the even 448; E5M2 has its limit at 61440, which goes to the even 65536 and so overflows.
* Zeros, and values that round to zero, keep their sign.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from support.oracles.interfaces import Array

Codes = NDArray[np.uint8]


class Format(NamedTuple):
    """A small float: bits of its fields, bias, code of the largest number, code for overflow (None: saturate)."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: int
    overflow: int | None


E4M3 = Format(4, 3, 7, 0x7E, 0x7F)
E5M2 = Format(5, 2, 15, 0x7B, 0x7C)
E2M1 = Format(2, 1, 1, 0x7, None)
NAN = 0x7F


def magnitudes(form: Format) -> Array:
    """Values of the codes 0 to `largest`, and of the next code as if it were a number."""
    codes = np.arange(form.largest + 2)
    e, m = codes >> form.mantissa_bits, codes & (2**form.mantissa_bits - 1)
    fraction = m / 2**form.mantissa_bits
    return np.where(e == 0, fraction * 2.0 ** (1 - form.bias), (1 + fraction) * 2.0 ** (e - form.bias))


def encode(x: NDArray[np.floating], form: Format, *, saturate: bool) -> Codes:
    """Codes of the values: sign in the highest bit."""
    values = magnitudes(form)
    size = np.abs(np.asarray(x, dtype=np.float64))
    high = np.clip(np.searchsorted(values, size), 1, form.largest + 1)
    low = high - 1
    nearer = (size - values[low]) - (values[high] - size)
    code = np.where((nearer > 0) | ((nearer == 0) & (high % 2 == 0)), high, low)
    beyond = form.largest if saturate or form.overflow is None else form.overflow
    code = np.where(code > form.largest, beyond, code)
    code = np.where(np.isinf(size), beyond, code)
    sign = np.signbit(x) << (form.exponent_bits + form.mantissa_bits)
    return np.where(np.isnan(size), NAN, code | sign).astype(np.uint8)


def decode(codes: Codes, form: Format) -> Array:
    """Values of the codes, infinities and NaN included."""
    bits = form.exponent_bits + form.mantissa_bits
    code = codes.astype(int) & (2**bits - 1)
    number = magnitudes(form)[np.minimum(code, form.largest)]
    special = np.where((form == E5M2) & (code == 0x7C), np.inf, np.nan)
    return np.where(code <= form.largest, number, special) * np.where(codes.astype(int) >> bits, -1.0, 1.0)


if __name__ == "__main__":
    import ml_dtypes

    everything = np.arange(256, dtype=np.uint8)
    rng = np.random.default_rng(0)
    spread = rng.normal(size=20000) * 2.0 ** rng.uniform(-20, 20, size=20000)
    for form, kind in ((E4M3, ml_dtypes.float8_e4m3fn), (E5M2, ml_dtypes.float8_e5m2)):
        numbers = decode(everything, form)
        np.testing.assert_array_equal(numbers, everything.view(kind).astype(np.float64))
        whole = np.isfinite(numbers)
        np.testing.assert_array_equal(encode(numbers[whole], form, saturate=False), everything[whole])
        ordered = np.unique(numbers[whole])
        ties = (ordered[1:] + ordered[:-1]) / 2
        hard = np.array([464.0, 464.1, 480.0, 61439.0, 61440.0, 65536.0, 1e30, np.inf, np.nan, 0.0, -0.0, 2.0**-17])
        x = np.concatenate([spread, ordered, ties, hard, -hard]).astype(np.float32)
        with np.errstate(over="ignore"):
            theirs = x.astype(kind).astype(np.float64)
        np.testing.assert_array_equal(decode(encode(x, form, saturate=False), form), theirs)
        held = decode(encode(x, form, saturate=True), form)
        clipped = np.clip(x, -ordered[-1], ordered[-1]).astype(kind).astype(np.float64)
        np.testing.assert_array_equal(held, clipped)
