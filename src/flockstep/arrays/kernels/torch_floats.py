"""Conversions between float32 and the 16-bit formats float16 and bfloat16, for torch."""

from __future__ import annotations

import math

import torch

from flockstep.arrays.kernels import torch_basics

_BELOW = (1 << 29) - 1
"""Mask of the bits of a float64's fraction that a float32's does not have."""


def narrowed(x: torch.Tensor, dtype: str, largest: float = math.inf) -> torch.Tensor:
    """Round float32 or float64 to the nearest float16 or bfloat16, ties to even.

    float64 is rounded to float32 before bfloat16. Finite values beyond ±largest, a number of `dtype`, become ±largest.
    Infinities do not change. NaN keeps its sign: a float16 NaN has the first bits of the fraction, or 1 if these are
    zero; a bfloat16 NaN becomes the quiet NaN.
    """
    kind = getattr(torch, dtype)
    cut = x if largest == math.inf else torch_basics.saturated(x, largest)
    if x.dtype == torch.float64:
        cut = _to_odd(cut) if dtype == "float16" else cut.to(torch.float32)
    out = cut.to(kind)
    if not torch.isnan(x.sum()):  # true for any NaN; if it came from ∞ - ∞, nothing changes below
        return out
    nan = torch.isnan(x)
    if dtype == "float16":
        words = x.view(torch.int64) >> 42 if x.dtype == torch.float64 else x.view(torch.int32) >> 13
        codes = 0x7C00 | (words & 0x3FF).clamp(min=1).to(torch.int16)
    else:
        codes = torch.full_like(out, 0, dtype=torch.int16) + 0x7FC0
    codes = torch.where(torch.signbit(x), codes | -0x8000, codes)
    return torch.where(nan, codes, out.view(torch.int16)).view(kind)


def _to_odd(x: torch.Tensor) -> torch.Tensor:
    """Truncate float64 to float32, setting the last bit if a bit was lost, so that rounding again equals
    rounding once.
    """
    bits = x.view(torch.int64)
    carried = (bits & _BELOW).add_(_BELOW)  # reaches the bit above if any bit is set
    return carried.bitwise_or_(bits).bitwise_and_(~_BELOW).view(torch.float64).to(torch.float32)


def widened(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Convert float16 or bfloat16 values to the dtype of the given name; the result may share memory with `x`."""
    return x.to(getattr(torch, dtype))


def add_widened(x: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> None:
    """Add scale * x to `out`, for x in float16 or bfloat16 and a flat contiguous `out` in float32 or float64."""
    wide = x.to(out.dtype)
    out += wide if scale == 1 else wide.mul_(scale)
