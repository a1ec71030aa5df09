"""Counter-based random numbers, and codes of a few bits packed into bytes, for numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flockstep.arrays.kernels.jit import beside, jit

Bytes = npt.NDArray[np.uint8]


@jit
def mixed(index: Any, seed: Any) -> Any:
    """Return 32 pseudo-random bits for (index, seed), from operations that vector registers support."""
    h = np.uint32(np.uint32(np.uint32(index) * np.uint32(0x9E3779B1)) + seed)
    h = np.uint32((h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D))
    h = np.uint32((h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(h ^ (h >> np.uint32(16)))


@jit
def fraction(index: Any, seed: Any) -> Any:
    """Return a pseudo-random multiple of 2⁻²⁴ in [0, 1) for (index, seed), as float32."""
    return np.float32(np.int32(mixed(index, seed) >> np.uint32(8))) * np.float32(2.0**-24)


def _plain_uniforms(out: Any, seed: Any) -> None:
    out[:] = fraction(np.arange(len(out), dtype=np.uint32), seed)


@beside(_plain_uniforms)
def _uniforms(out: Any, seed: Any) -> None:
    for i in range(len(out)):
        out[i] = fraction(i, seed)


def uniforms(like: Bytes, size: int, seed: int) -> npt.NDArray[np.float32]:
    """Return an array (size,) of pseudo-random multiples of 2⁻²⁴ in [0, 1).

    Element i depends on i and `seed` alone; the array is of the library of `like`.
    """
    out = np.empty(size, np.float32)
    _uniforms(out, np.uint32(seed))
    return out


@jit
def _lanes(bits: int) -> Any:
    """Return the masks of a word for the first of two codes, of two pairs, and of two fours."""
    one, b = np.uint64(1), np.uint64(bits)
    singles = ((one << b) - one) * np.uint64(0x0001000100010001)
    pairs = ((one << (b + b)) - one) * np.uint64(0x0000000100000001)
    return singles, pairs, (one << np.uint64(4 * bits)) - one


@jit
def _together(w: Any, bits: int) -> Any:
    """Pack eight codes, one per byte of a word, next to each other."""
    singles, pairs, fours = _lanes(bits)
    b, gap = np.uint64(bits), np.uint64(8 - bits)
    b2, b4, gap2, gap4 = np.uint64(2 * bits), np.uint64(4 * bits), np.uint64(16 - 2 * bits), np.uint64(32 - 4 * bits)
    w = (w & singles) | ((w >> gap) & (singles << b))
    w = (w & pairs) | ((w >> gap2) & (pairs << b2))
    return (w & fours) | ((w >> gap4) & (fours << b4))


@jit
def _apart(w: Any, bits: int) -> Any:
    """Unpack eight adjacent codes into one byte each of a word."""
    singles, pairs, fours = _lanes(bits)
    gap, gap2, gap4 = np.uint64(8 - bits), np.uint64(16 - 2 * bits), np.uint64(32 - 4 * bits)
    w = (w & fours) | ((w << gap4) & (fours << np.uint64(32)))
    w = (w & pairs) | ((w << gap2) & (pairs << np.uint64(16)))
    return (w & singles) | ((w << gap) & (singles << np.uint64(8)))


def _plain_fold(words: Any, bits: int, out: Any) -> None:
    packed = _together(words, bits).astype("<u8", copy=False).view(np.uint8).reshape(-1, 8)
    out[:] = packed[:, :bits].reshape(-1)


@beside(_plain_fold)
def fold(words: Any, bits: int, out: Any) -> None:
    """Pack eight codes, one in each byte of the integer `words`, into `bits` bytes of `out`."""
    if bits == 1:
        for i in range(len(words)):
            out[i] = np.uint8((words[i] * np.uint64(0x0102040810204080)) >> np.uint64(56))
    elif bits == 2:
        twins = out.view(np.uint16)
        for i in range(len(words)):
            twins[i] = np.uint16(_together(words[i], 2))
    elif bits == 4:
        quads = out.view(np.uint32)
        for i in range(len(words)):
            quads[i] = np.uint32(_together(words[i], 4))
    else:
        for i in range(len(words)):
            w = _together(words[i], bits)
            for j in range(bits):
                out[bits * i + j] = np.uint8(w >> np.uint64(8 * j))


def _plain_unfold(data: Any, bits: int, words: Any) -> None:
    given = np.zeros(len(words) * bits, np.uint8)
    given[: len(data)] = data[: len(given)]
    packed = np.zeros((len(words), 8), np.uint8)
    packed[:, :bits] = given.reshape(-1, bits)
    words[:] = _apart(packed.view("<u8")[:, 0], bits)


@beside(_plain_unfold)
def unfold(data: Any, bits: int, words: Any) -> None:
    """Unpack `bits` bytes of `data` into eight codes, one in each byte of the returned integer; bytes beyond the end of
    `data` count as zero.
    """
    whole = min(len(words), len(data) // bits)
    if bits == 1:
        for i in range(whole):
            words[i] = _apart(np.uint64(data[i]), 1)
    elif bits == 2:
        for i in range(whole):
            words[i] = _apart(np.uint64(data[2 * i]) | (np.uint64(data[2 * i + 1]) << np.uint64(8)), 2)
    elif bits == 4:
        for i in range(whole):
            lower = np.uint64(data[4 * i]) | (np.uint64(data[4 * i + 1]) << np.uint64(8))
            upper = np.uint64(data[4 * i + 2]) | (np.uint64(data[4 * i + 3]) << np.uint64(8))
            words[i] = _apart(lower | (upper << np.uint64(16)), 4)
    else:
        for i in range(whole):
            w = np.uint64(0)
            for j in range(bits):
                w |= np.uint64(data[bits * i + j]) << np.uint64(8 * j)
            words[i] = _apart(w, bits)
    for i in range(whole, len(words)):
        w = np.uint64(0)
        for j in range(min(bits, max(0, len(data) - i * bits))):
            w |= np.uint64(data[bits * i + j]) << np.uint64(8 * j)
        words[i] = _apart(w, bits)


def packed_bytes(count: int, bits: int) -> int:
    """Return the number of bytes that `count` codes of `bits` bits each occupy."""
    return (count * bits + 7) // 8


def pack(codes: Bytes, bits: int) -> Bytes:
    """Pack codes of 1 to 8 `bits` each into bytes, lowest bit first; the last byte is filled up with zero bits."""
    padded = np.zeros((len(codes) + 7) // 8 * 8, np.uint8)
    padded[: len(codes)] = codes
    out = np.empty(len(padded) // 8 * bits, np.uint8)
    fold(padded.view(np.uint64), bits, out)
    return out[: packed_bytes(len(codes), bits)]


def unpack(data: Bytes, count: int, bits: int) -> Bytes:
    """Return the first `count` codes that `pack` has packed into `data`."""
    words = np.empty((count + 7) // 8, np.uint64)
    unfold(locked(data), bits, words)
    return words.view(np.uint8)[:count]


def locked(array: Any) -> Any:
    """Return a contiguous read-only view, the only kind of array that kernels are compiled for."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view
