"""Between float32 and the formats of 16 bits, float16 and bfloat16, for torch."""

from __future__ import annotations

import math

import torch

from flockstep.arrays.kernels import torch_basics

_BELOW = (1 << 29) - 1
"""The bits of a float64's fraction that a float32's has not."""


def narrowed(x: torch.Tensor, dtype: str, largest: float = math.inf) -> torch.Tensor:
    """Float32 or float64 as float16 or bfloat16: the nearest, of two the even one.

    float64 becomes bfloat16 by way of float32. Finite values beyond ±largest, a number of `dtype`, become that;
    infinities stay, and NaN with its sign: of float16 with the first bits of its fraction or, where they are zero, a 1;
    of bfloat16 as the quiet one.
    """
    kind = getattr(torch, dtype)
    cut = x if largest == math.inf else torch_basics.saturated(x, largest)
    if x.dtype == torch.float64:
        cut = _to_odd(cut) if dtype == "float16" else cut.to(torch.float32)
    out = cut.to(kind)
    if not torch.isnan(x.sum()):  # true of any NaN; where it is not one but ∞ - ∞, nothing is changed below
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
    """Float64 as float32, cut off, the last bit 1 if anything was: rounded again, it is as if rounded once."""
    bits = x.view(torch.int64)
    carried = (bits & _BELOW).add_(_BELOW)  # reaches the bit above if any bit is set
    return carried.bitwise_or_(bits).bitwise_and_(~_BELOW).view(torch.float64).to(torch.float32)


def widened(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """float16 or bfloat16 in the dtype of that name; may share memory."""
    return x.to(getattr(torch, dtype))


def add_widened(x: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> None:
    """out += scale * x: float16 or bfloat16 to float32 or float64, flat and contiguous, and computed in that."""
    wide = x.to(out.dtype)
    out += wide if scale == 1 else wide.mul_(scale)
