"""From tensors to bytes and back; little-endian machines only, as torch itself."""

from __future__ import annotations

import torch


def as_floats(array: torch.Tensor) -> torch.Tensor:
    """A flat contiguous tensor to compute with: float64 as it is, everything else as float32. May share memory."""
    kind = torch.float64 if array.dtype == torch.float64 else torch.float32
    return array.detach().reshape(-1).to(kind).contiguous()


def saturated(array: torch.Tensor, largest: float) -> torch.Tensor:
    """A copy with finite values beyond ±largest cut off there; infinities and NaN stay."""
    return torch.where(torch.isfinite(array), array.clamp(-largest, largest), array)


def as_bytes(array: torch.Tensor) -> torch.Tensor:
    """The bytes of a flat tensor; may share memory."""
    return array.contiguous().as_strided(array.shape, (1,)).view(torch.uint8)  # one element may have any stride


def from_bytes(data: torch.Tensor, dtype: str) -> torch.Tensor:
    """The tensor whose bytes are `data`; a copy."""
    return data.clone().view(getattr(torch, dtype))


def join(*parts: torch.Tensor) -> torch.Tensor:
    """All parts, one after the other."""
    return torch.cat(parts) if len(parts) != 1 else parts[0]
