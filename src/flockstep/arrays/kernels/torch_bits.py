"""Counter-based random numbers, and codes of a few bits packed into bytes, for torch."""

from __future__ import annotations

import torch

from flockstep.arrays.kernels.numpy_bits import packed_bytes

_WORD = 0xFFFFFFFF


def mixed(index: torch.Tensor, seed: int) -> torch.Tensor:
    """Return 32 pseudo-random bits for (index, seed), as int64."""
    h = (index * 0x9E3779B1 + seed) & _WORD
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _WORD
    h = ((h ^ (h >> 15)) * 0x846CA68B) & _WORD
    return h ^ (h >> 16)


def uniforms(like: torch.Tensor, size: int, seed: int) -> torch.Tensor:
    """Return a tensor (size,) of pseudo-random multiples of 2⁻²⁴ in [0, 1).

    Element i depends on i and `seed` alone; the tensor is on the device of `like`.
    """
    return (mixed(torch.arange(size, device=like.device), seed) >> 8).to(torch.float32) * 2.0**-24


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes of 1 to 8 `bits` each into bytes, lowest bit first; the last byte is filled up with zero bits."""
    padded = torch.zeros((len(codes) + 7) // 8 * 8, dtype=torch.int64, device=codes.device)
    padded[: len(codes)] = codes
    places = torch.arange(8, device=codes.device)
    words = (padded.reshape(-1, 8) << (bits * places)).sum(1)  # no bit occurs twice, so the sum is the bitwise or
    out = (words[:, None] >> (8 * places[:bits])) & 0xFF
    return out.to(torch.uint8).reshape(-1)[: packed_bytes(len(codes), bits)]


def unpack(data: torch.Tensor, count: int, bits: int) -> torch.Tensor:
    """Return the first `count` codes that `pack` has packed into `data`."""
    eights = (count + 7) // 8
    padded = torch.zeros(eights * bits, dtype=torch.int64, device=data.device)
    padded[: len(data)] = data
    places = torch.arange(8, device=data.device)
    words = (padded.reshape(-1, bits) << (8 * places[:bits])).sum(1)
    codes = (words[:, None] >> (bits * places)) & ((1 << bits) - 1)
    return codes.to(torch.uint8).reshape(-1)[:count]
