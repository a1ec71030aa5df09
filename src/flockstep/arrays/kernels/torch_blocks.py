"""Scales of blocks, and elements as whole multiples of a fraction of them, for torch."""

from __future__ import annotations

import torch

from flockstep.arrays.kernels import numpy_blocks
from flockstep.arrays.kernels.torch_bits import pack, uniforms, unpack


def _rows(x: torch.Tensor, block: int) -> torch.Tensor:
    """(blocks, elements of a block), the last filled up with zeros."""
    blocks = -(-len(x) // block)
    width = min(block, max(len(x), 1))
    return torch.nn.functional.pad(x, (0, blocks * width - len(x))).reshape(blocks, width)


def block_scales(x: torch.Tensor, block: int, norm: bool = False) -> torch.Tensor:
    """Of every block of `x` (float32 or 64) the largest magnitude, or the Euclidean norm; of the dtype of `x`.

    What is not finite shows in the scale of its block. A finite norm that the dtype cannot hold is its largest number.
    """
    if norm and x.device.type == "cpu":  # for the same order of the sum as of arrays, hence the same bits
        return torch.from_numpy(numpy_blocks.block_scales(x.detach().numpy(), block, True))
    return device_scales(x, block, norm)


def device_scales(x: torch.Tensor, block: int, norm: bool) -> torch.Tensor:
    """`block_scales` on any device; a norm may be off by its last place."""
    rows = _rows(x, block)
    if not len(rows):
        return x.new_zeros(0)
    top = rows.abs().amax(1)
    if not norm:
        return top
    wide, highest = rows.to(torch.float64), torch.finfo(x.dtype).max
    squares = wide.square().sum(1)
    direct = squares.sqrt().clamp(max=highest)
    divisor = torch.where(top > 0, top, 1).to(torch.float64)[:, None]
    ratio = divisor[:, 0] * (wide / divisor).square().sum(1).sqrt()
    norms = torch.where((squares > 1e-280) & (squares < 1e300), direct, ratio.clamp(max=highest)).to(x.dtype)
    return torch.where((top > 0) & torch.isfinite(top), norms, top)


def _of_elements(scales: torch.Tensor, block: int, size: int) -> torch.Tensor:
    """The scale of each of `size` elements."""
    return scales.repeat_interleave(min(block, max(size, 1)))[:size]


def quantise(x: torch.Tensor, scales: torch.Tensor, block: int, levels: int, bits: int, seed: int = -1) -> torch.Tensor:
    """q + levels for every element, q = x / scale * levels, in `bits` bits.

    Rounded to the nearest, ties to even, where `seed` is negative; otherwise up or down at random so that the mean is
    kept. Magnitudes beyond a block's scale count as the scale (at random only).
    """
    scale = _of_elements(scales, block, len(x))
    ratio = x / torch.where(scale > 0, scale, 1) * levels
    if seed < 0:
        q = ratio.round().to(torch.int64)
    else:
        m = ratio.abs().clamp(max=levels)
        q = m.to(torch.int64)
        q = q + (m - q.to(m.dtype) > uniforms(x, len(x), seed)).to(torch.int64)
        q = torch.where(x >= 0, q, -q)
    return pack(torch.where(scale > 0, q, 0) + levels, bits)


def steps(scales: torch.Tensor, levels: int) -> torch.Tensor:
    """scale / levels, rounded so that `levels` of them are finite."""
    step = scales / levels
    return torch.where(torch.isfinite(step * levels), step, torch.nextafter(step, torch.zeros_like(step)))


def dequantise(
    data: torch.Tensor, step: torch.Tensor, block: int, levels: int, bits: int, size: int
) -> tuple[torch.Tensor, int]:
    """(code - levels) * step of every element, and the largest code, which of sound data is at most 2 levels."""
    codes = unpack(data, size, bits)
    top = int(codes.max()) if size else 0
    return (codes.to(torch.int64) - levels).to(step.dtype) * _of_elements(step, block, size), top


def add_dequantised(
    data: torch.Tensor, step: torch.Tensor, block: int, levels: int, bits: int, out: torch.Tensor
) -> int:
    """`dequantise`, added to `out`, flat, of the dtype of `step`; the largest code."""
    decoded, top = dequantise(data, step, block, levels, bits, len(out))
    out += decoded
    return top
