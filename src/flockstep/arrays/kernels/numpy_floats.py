"""Conversions between float32 and the 16-bit formats float16 and bfloat16, for numpy.

numpy's own conversion to float16 and back uses branches and, for subnormal results, processor flags, and is many times
slower. Here every case is computed for every element and one is selected.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from flockstep.arrays.kernels import numpy_basics, numpy_dtype
from flockstep.arrays.kernels.jit import beside, jit
from flockstep.arrays.kernels.numpy_bits import locked
from flockstep.arrays.namespace import cast
from flockstep.arrays.schema import FlatArray

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_LEAST_NORMAL = np.uint32(0x38800000)
"""float32's bits of 2⁻¹⁴, float16's smallest normal number."""
_ONE_HALF = np.uint32(0x3F000000)
"""float32's bits of 0.5, whose last place is 2⁻²⁴, float16's smallest number."""


def _plain_to_half(x: Any, words: Any, top: Any, out: Any) -> None:
    out[:] = np.minimum(x.astype(np.float16).view(np.uint16) & np.uint16(0x7FFF), np.uint16(top))
    special = np.flatnonzero(~np.isfinite(x))
    payload = (words[special] >> np.uint32(13)) & np.uint32(0x3FF)
    out[special] = np.uint32(0x7C00) | np.where(payload > 0, payload, np.isnan(x[special]))
    out |= (words >> np.uint32(16)).astype(np.uint16) & np.uint16(0x8000)


@beside(_plain_to_half)
def _to_half(x: Any, words: Any, top: Any, out: Any) -> None:
    for i in range(len(words)):
        w = words[i]
        m = np.uint32(w & _MAGNITUDE)
        odd = np.uint32((m >> np.uint32(13)) & np.uint32(1))
        # Lower the exponent by 112; add half a last place less one bit, plus that bit if odd, so that ties go to even.
        normal = np.uint32(np.uint32(np.uint32(m + np.uint32(0xC8000FFF)) + odd) >> np.uint32(13))
        tiny = np.uint32(np.float32(abs(x[i]) + np.float32(0.5)).view(np.uint32) - _ONE_HALF)  # the addition rounds
        code = tiny if m < _LEAST_NORMAL else min(normal, top)
        payload = np.uint32((m >> np.uint32(13)) & np.uint32(0x3FF))
        special = np.uint32(np.uint32(0x7C00) | (payload if payload > np.uint32(0) else np.uint32(m > _INFINITY)))
        code = code if m < _INFINITY else special
        out[i] = np.uint16(code | ((w >> np.uint32(16)) & np.uint32(0x8000)))


def _plain_to_bfloat16(words: Any, top: Any, out: Any) -> None:
    m = words & _MAGNITUDE
    code = (m + np.uint32(0x7FFF) + ((m >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    code = np.where((code < top) | (m == _INFINITY), code, top)
    code = np.where(m <= _INFINITY, code, np.uint32(0x7FC0))
    out[:] = code | ((words >> np.uint32(16)) & np.uint32(0x8000))


@beside(_plain_to_bfloat16)
def _to_bfloat16(words: Any, top: Any, out: Any) -> None:
    for i in range(len(words)):
        w = words[i]
        m = np.uint32(w & _MAGNITUDE)
        odd = np.uint32((m >> np.uint32(16)) & np.uint32(1))
        code = np.uint32(np.uint32(np.uint32(m + np.uint32(0x7FFF)) + odd) >> np.uint32(16))
        code = code if code < top or m == _INFINITY else top
        code = code if m <= _INFINITY else np.uint32(0x7FC0)
        out[i] = np.uint16(code | ((w >> np.uint32(16)) & np.uint32(0x8000)))


@jit
def _of_half(h: Any) -> Any:
    """Return the float32 bits of a float16 with the bits `h`."""
    m = np.uint32(h & np.uint32(0x7FFF))
    shifted = np.uint32(m << np.uint32(13))
    normal = np.uint32(shifted + np.uint32(112 << 23))
    tiny = np.float32(np.uint32(_ONE_HALF + m).view(np.float32) - np.float32(0.5)).view(np.uint32)
    bits = tiny if m < np.uint32(0x400) else normal
    bits = bits if m < np.uint32(0x7C00) else np.uint32(shifted + np.uint32(224 << 23))
    return np.uint32(bits | np.uint32((h & np.uint32(0x8000)) << np.uint32(16)))


@cache
def _halves() -> Any:
    """Return the float32 of each of the 2¹⁶ float16 codes; numpy's own conversion may change the bits of NaN."""
    h = np.arange(1 << 16, dtype=np.uint32)
    m = h & np.uint32(0x7FFF)
    shifted = m << np.uint32(13)
    tiny = ((_ONE_HALF + m).view(np.float32) - np.float32(0.5)).view(np.uint32)
    bits = np.where(m < 0x7C00, shifted + np.uint32(112 << 23), shifted + np.uint32(224 << 23))
    bits = np.where(m < 0x400, tiny, bits)
    return (bits | ((h & np.uint32(0x8000)) << np.uint32(16))).view(np.float32)


def _plain_put_half(codes: Any, out: Any) -> None:
    out[:] = _halves()[codes]


@beside(_plain_put_half)
def _put_half(codes: Any, out: Any) -> None:
    for i in range(len(codes)):
        out[i] = np.uint32(_of_half(np.uint32(codes[i]))).view(np.float32)


def _plain_add_half(codes: Any, scale: Any, out: Any) -> None:
    out += scale * _halves()[codes].astype(out.dtype)


@beside(_plain_add_half)
def _add_half(codes: Any, scale: Any, out: Any) -> None:
    for i in range(len(codes)):
        out[i] += scale * out.dtype.type(np.uint32(_of_half(np.uint32(codes[i]))).view(np.float32))


def _plain_add_bfloat16(codes: Any, scale: Any, out: Any) -> None:
    out += scale * (codes.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(out.dtype)


@beside(_plain_add_bfloat16)
def _add_bfloat16(codes: Any, scale: Any, out: Any) -> None:
    for i in range(len(codes)):
        out[i] += scale * out.dtype.type(np.uint32(np.uint32(codes[i]) << np.uint32(16)).view(np.float32))


def narrowed(x: FlatArray, dtype: str, largest: float = np.inf) -> FlatArray:
    """Round float32 or float64 to the nearest float16 or bfloat16, ties to even.

    float64 is rounded to float32 before bfloat16. Finite values beyond ±largest, a number of `dtype`, become ±largest.
    Infinities do not change. NaN keeps its sign: a float16 NaN has the first bits of the fraction, or 1 if these are
    zero; a bfloat16 NaN becomes the quiet NaN.
    """
    kind = numpy_dtype(dtype)
    if x.dtype == np.float64:
        with np.errstate(all="ignore"):
            x = numpy_basics.saturated(x, largest).astype(kind if dtype == "float16" else np.float32)
        if dtype == "float16":
            return x
    x, out = _aligned(x), np.empty(len(x), np.uint16)
    top = np.uint32(np.array(largest, kind).view(np.uint16))
    if dtype == "float16":
        _to_half(x, x.view(np.uint32), top, out)
    else:
        _to_bfloat16(x.view(np.uint32), top, out)
    return out.view(kind)


def widened(x: FlatArray, dtype: str) -> FlatArray:
    """Convert float16 or bfloat16 values to the dtype of the given name; the result may share memory with `x`."""
    if x.dtype != np.float16 or dtype not in ("float32", "float64"):
        return cast(x, dtype, copy=False)
    out = np.empty(len(x), dtype)
    _put_half(_aligned(x).view(np.uint16), out)
    return out


def add_widened(x: FlatArray, out: FlatArray, scale: float = 1.0) -> None:
    """Add scale * x to `out`, for x in float16 or bfloat16 and a flat contiguous `out` in float32 or float64."""
    add = _add_half if x.dtype == np.float16 else _add_bfloat16
    add(_aligned(x).view(np.uint16), out.dtype.type(scale), out)


def _aligned(x: Any) -> Any:
    """Return a contiguous, read-only and aligned array; bytes from the middle of a message may be unaligned."""
    return locked(x if x.flags.aligned else x.copy())
