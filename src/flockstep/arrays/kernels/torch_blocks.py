"""Block scales, and quantization of elements to integer multiples of a fraction of the scale, for torch."""

from __future__ import annotations

import torch

from flockstep.arrays.kernels import numpy_blocks
from flockstep.arrays.kernels.torch_bits import pack, uniforms, unpack


def _rows(x: torch.Tensor, block: int) -> torch.Tensor:
    """Return the blocks as rows (blocks, elements of a block), the last row padded with zeros."""
    blocks = -(-len(x) // block)
    width = min(block, max(len(x), 1))
    return torch.nn.functional.pad(x, (0, blocks * width - len(x))).reshape(blocks, width)


def block_scales(x: torch.Tensor, block: int, norm: bool = False) -> torch.Tensor:
    """Return the largest magnitude or the Euclidean norm of every block of `x` (float32 or float64), in the dtype of
    `x`.

    The scale of a block that is not finite is not finite. A finite norm beyond the dtype's range is the dtype's largest
    number.
    """
    if norm and x.device.type == "cpu":  # the same order of the sum as for numpy arrays, hence the same bits
        return torch.from_numpy(numpy_blocks.block_scales(x.detach().numpy(), block, True))
    return device_scales(x, block, norm)


def device_scales(x: torch.Tensor, block: int, norm: bool) -> torch.Tensor:
    """Compute the scales of `block_scales` on any device; a norm may differ in its last digit."""
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
    """Return the scale of each of `size` elements."""
    return scales.repeat_interleave(min(block, max(size, 1)))[:size]


def quantize(x: torch.Tensor, scales: torch.Tensor, block: int, levels: int, bits: int, seed: int = -1) -> torch.Tensor:
    """Quantize every element to an integer q ≈ x / scale * levels, and return the codes q + levels, packed into `bits`
    bits each.

    If `seed` is negative, q is rounded to the nearest integer, ties to even; otherwise it is rounded up or down at
    random, so that the mean is preserved, and magnitudes beyond a block's scale count as the scale.
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
    """Return the quantization step of each block: its scale divided by `levels`, rounded so that `levels` times the
    step is finite.
    """
    step = scales / levels
    return torch.where(torch.isfinite(step * levels), step, torch.nextafter(step, torch.zeros_like(step)))


def dequantize(
    data: torch.Tensor, step: torch.Tensor, block: int, levels: int, bits: int, size: int
) -> tuple[torch.Tensor, int]:
    """Decode every element as (code - levels) * step; return the elements and the largest code, which is at most 2 ·
    levels in valid data.
    """
    codes = unpack(data, size, bits)
    top = int(codes.max()) if size else 0
    return (codes.to(torch.int64) - levels).to(step.dtype) * _of_elements(step, block, size), top


def add_dequantized(
    data: torch.Tensor, step: torch.Tensor, block: int, levels: int, bits: int, out: torch.Tensor
) -> int:
    """Decode quantized elements as `dequantize` does, and add them to `out`, a flat tensor of the dtype of `step`;
    return the largest code.
    """
    decoded, top = dequantize(data, step, block, levels, bits, len(out))
    out += decoded
    return top
