"""Conversions between tensors and bytes; for little-endian machines only, like torch itself."""

from __future__ import annotations

import torch


def as_floats(array: torch.Tensor) -> torch.Tensor:
    """Return a flat contiguous view or copy of a tensor: float64 stays float64, other dtypes become float32."""
    kind = torch.float64 if array.dtype == torch.float64 else torch.float32
    return array.detach().reshape(-1).to(kind).contiguous()


def saturated(array: torch.Tensor, largest: float) -> torch.Tensor:
    """Return a copy in which finite values beyond ±largest become ±largest; infinities and NaN do not change."""
    return torch.where(torch.isfinite(array), array.clamp(-largest, largest), array)


def as_bytes(array: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a flat tensor, as a view of its memory if possible."""
    return array.contiguous().as_strided(array.shape, (1,)).view(torch.uint8)  # one element may have any stride


def from_bytes(data: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return a new tensor whose bytes are `data`."""
    return data.clone().view(getattr(torch, dtype))


def join(*parts: torch.Tensor) -> torch.Tensor:
    """Return one tensor with all parts, in the given order."""
    return torch.cat(parts) if len(parts) != 1 else parts[0]
