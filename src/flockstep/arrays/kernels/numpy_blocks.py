"""Block scales, and quantization of elements to integer multiples of a fraction of the scale, for numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

from flockstep.arrays.kernels.jit import beside, fast, jit
from flockstep.arrays.kernels.numpy_bits import Bytes, fold, fraction, locked, packed_bytes, unfold, unpack
from flockstep.arrays.schema import FlatArray

CHUNK = 1024
"""Number of elements processed at a time, so that intermediate results stay in the first-level cache."""


@fast
def _squares(x: Any) -> float:
    total = 0.0
    for i in range(len(x)):
        v = np.float64(x[i])
        total += v * v
    return total


@jit
def largest_bits(words: Any, mask: Any) -> Any:
    """Return the largest bits without the sign: floats' bits order like their magnitudes, with infinity and
    NaN on top.
    """
    top = words.dtype.type(0)
    for i in range(len(words)):
        top = max(top, words.dtype.type(words[i] & mask))
    return top


def _of_elements(scales: Any, block: int, size: int) -> Any:
    """Return the scale of each of `size` elements."""
    return np.repeat(scales, min(block, max(size, 1)))[:size]


def _plain_scales(
    x: Any, words: Any, mask: Any, block: int, norm: bool, out: Any, out_words: Any, highest: Any
) -> None:
    if not len(out):
        return
    width = min(block, len(x))
    padded = np.zeros(len(out) * width, x.dtype)
    padded[: len(x)] = x
    out_words[:] = (padded.view(words.dtype) & mask).reshape(-1, width).max(axis=1)
    if norm:
        wide, top = padded.reshape(-1, width).astype(np.float64), out.astype(np.float64)
        squares = np.square(wide).sum(axis=1)
        ratios = np.square(wide / np.where(top > 0, top, 1)[:, None]).sum(axis=1)
        norms = np.where((squares > 1e-280) & (squares < 1e300), np.sqrt(squares), top * np.sqrt(ratios))
        out[:] = np.where((top > 0) & (top < np.inf), np.minimum(norms, highest), out)


@beside(_plain_scales)
def _scales(x: Any, words: Any, mask: Any, block: int, norm: bool, out: Any, out_words: Any, highest: Any) -> None:
    for b in range(len(out)):
        begin, end = b * block, min((b + 1) * block, len(x))
        if not norm:
            out_words[b] = largest_bits(words[begin:end], mask)
            continue
        squares = _squares(x[begin:end])
        if squares > 1e-280 and squares < 1e300:
            out[b] = min(np.sqrt(squares), highest)
            continue
        out_words[b] = largest_bits(words[begin:end], mask)
        top = np.float64(out[b])
        if top > 0 and top < np.inf:
            squares = 0.0
            for i in range(begin, end):
                ratio = np.float64(x[i]) / top
                squares += ratio * ratio
            out[b] = min(top * np.sqrt(squares), highest)


@jit
def _codes(x: Any, begin: int, scale: Any, levels: Any, seed: Any, magic: Any, random: bool, codes: Any) -> None:
    kind = x.dtype.type
    zero = np.int32(levels)
    if not scale > 0:
        for i in range(len(x)):
            codes[i] = np.uint8(zero)
    elif random:
        for i in range(len(x)):
            m = min(abs(x[i]) / scale * levels, levels)
            q = np.int32(m)
            q = np.int32(q + np.int32(m - kind(q) > fraction(begin + i, seed)))
            codes[i] = np.uint8(np.int32(zero + (q if x[i] >= 0 else -q)))
    else:
        for i in range(len(x)):
            codes[i] = np.uint8(np.int32(zero + np.int32((x[i] / scale * levels + magic) - magic)))


def _plain_quantize(x: Any, scales: Any, block: int, levels: Any, bits: int, seed: int, magic: Any, out: Any) -> None:
    codes, each = np.zeros((len(x) + 7) // 8 * 8, np.uint8), _of_elements(scales, block, len(x))
    for begin in range(0, len(x), 16 * CHUNK):  # what is computed on the way stays in the second-level cache
        part, scale = x[begin : begin + 16 * CHUNK], each[begin : begin + 16 * CHUNK]
        some = scale > 0
        ratio = part / np.where(some, scale, 1) * levels
        if seed >= 0:
            m = np.minimum(abs(ratio), levels)
            q = m.astype(np.int32)
            q += m - q.astype(x.dtype) > fraction(np.arange(begin, begin + len(part), dtype=np.uint32), np.uint32(seed))
            q = np.where(part >= 0, q, -q)
        else:
            q = ((ratio + magic) - magic).astype(np.int32)
        codes[begin : begin + len(part)] = np.where(some, q, 0) + np.int32(levels)
    fold(codes.view(np.uint64), bits, out)


@beside(_plain_quantize)
def _quantize(x: Any, scales: Any, block: int, levels: Any, bits: int, seed: int, magic: Any, out: Any) -> None:
    words, drawn, random = np.zeros(CHUNK // 8, np.uint64), np.uint32(max(seed, 0)), seed >= 0
    codes = words.view(np.uint8)
    for b in range(len(scales)):
        for begin in range(b * block, min((b + 1) * block, len(x)), CHUNK):
            end = min(begin + CHUNK, (b + 1) * block, len(x))
            _codes(x[begin:end], begin, scales[b], levels, drawn, magic, random, codes)
            for i in range(end - begin, min(CHUNK, (end - begin + 7) // 8 * 8)):
                codes[i] = 0
            if bits == 8:
                part = out[begin:end]
                for i in range(len(part)):
                    part[i] = codes[i]
            else:
                eights = (end - begin + 7) // 8
                fold(words[:eights], bits, out[begin // 8 * bits : (begin // 8 + eights) * bits])


def _plain_dequantize(data: Any, steps: Any, block: int, levels: int, bits: int, out: Any, add: bool) -> int:
    codes = unpack(data, len(out), bits)
    values = (codes.astype(np.int32) - np.int32(levels)).astype(out.dtype) * _of_elements(steps, block, len(out))
    out[:] = out + values if add else values
    return int(codes.max(initial=0))


@beside(_plain_dequantize)
def _dequantize(data: Any, steps: Any, block: int, levels: int, bits: int, out: Any, add: bool) -> int:
    words = np.zeros(CHUNK // 8, np.uint64)
    codes = words.view(np.uint8)
    zero, top = np.int32(levels), np.uint8(0)
    for b in range(len(steps)):
        for begin in range(b * block, min((b + 1) * block, len(out)), CHUNK):
            end = min(begin + CHUNK, (b + 1) * block, len(out))
            if bits == 8:
                coded = data[begin:end]
                for i in range(len(coded)):
                    codes[i] = coded[i]
            else:
                unfold(data[begin // 8 * bits : (end * bits + 7) // 8], bits, words[: (end - begin + 7) // 8])
            part, step = out[begin:end], steps[b]
            for i in range(end - begin):
                top = max(top, codes[i])
            if add:
                for i in range(end - begin):
                    part[i] += out.dtype.type(np.int32(np.int32(codes[i]) - zero)) * step
            else:
                for i in range(end - begin):
                    part[i] = out.dtype.type(np.int32(np.int32(codes[i]) - zero)) * step
    return int(top)


def _words(x: FlatArray) -> tuple[Any, Any]:
    """Return the bits of a flat contiguous array, and the mask of the magnitude's bits."""
    if x.dtype == np.float64:
        return x.view(np.uint64), np.uint64((1 << 63) - 1)
    return x.view(np.uint32), np.uint32((1 << 31) - 1)


def block_scales(x: FlatArray, block: int, norm: bool = False) -> FlatArray:
    """Return the largest magnitude or the Euclidean norm of every block of `x` (float32 or float64), in the dtype of
    `x`.

    The scale of a block that is not finite is not finite. A finite norm beyond the dtype's range is the dtype's largest
    number.
    """
    x = locked(x)
    scales = np.empty(-(-len(x) // block), x.dtype)
    words, mask = _words(x)
    _scales(x, words, mask, block, norm, scales, _words(scales)[0], float(np.finfo(x.dtype).max))
    return scales


def quantize(x: FlatArray, scales: FlatArray, block: int, levels: int, bits: int, seed: int = -1) -> Bytes:
    """Quantize every element to an integer q ≈ x / scale * levels, and return the codes q + levels, packed into `bits`
    bits each.

    If `seed` is negative, q is rounded to the nearest integer, ties to even; otherwise it is rounded up or down at
    random, so that the mean is preserved, and magnitudes beyond a block's scale count as the scale. Either `block` is a
    multiple of 8, or `bits` is 8, or there is only one block.
    """
    x = locked(x)
    kind = x.dtype.type
    magic = kind(1.5 * 2.0 ** (52 if x.dtype == np.float64 else 23))  # adding it leaves no bits below one
    out = np.empty((len(x) + 7) // 8 * bits, np.uint8)
    _quantize(x, scales, block, kind(levels), bits, seed, magic, out)
    return out[: packed_bytes(len(x), bits)]


def steps(scales: FlatArray, levels: int) -> FlatArray:
    """Return the quantization step of each block: its scale divided by `levels`, rounded so that `levels` times the
    step is finite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        step: FlatArray = scales / scales.dtype.type(levels)
        over = ~np.isfinite(step * scales.dtype.type(levels))
    step[over] = np.nextafter(step[over], scales.dtype.type(0))
    return step


def dequantize(data: Bytes, step: FlatArray, block: int, levels: int, bits: int, size: int) -> tuple[FlatArray, int]:
    """Decode every element as (code - levels) * step; return the elements and the largest code, which is at most 2 ·
    levels in valid data.
    """
    out = np.empty(size, step.dtype)
    top = _dequantize(locked(data), step, block, levels, bits, out, False)
    return out, top


def add_dequantized(data: Bytes, step: FlatArray, block: int, levels: int, bits: int, out: FlatArray) -> int:
    """Decode quantized elements as `dequantize` does, and add them to `out`, a flat contiguous array of the dtype of
    `step`; return the largest code.
    """
    return int(_dequantize(locked(data), step, block, levels, bits, out, True))
