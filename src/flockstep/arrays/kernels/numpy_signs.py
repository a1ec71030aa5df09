"""Sign quantization with the means of negative and of nonnegative elements, and rounding to powers of two, for
numpy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flockstep.arrays.kernels.jit import beside, fast
from flockstep.arrays.kernels.numpy_bits import Bytes, fold, locked, mixed, pack, packed_bytes, unfold, unpack
from flockstep.arrays.schema import FlatArray

CHUNK = 1024
AT_ONCE = 1 << 16
"""Number of elements that one compiled call processes, so that they stay in the second-level cache."""


@fast
def _side_sums(x: Any) -> Any:
    """Return the sum of the elements >= 0, the sum of the others, and the number of those below 0."""
    above, below, negative = 0.0, 0.0, np.int32(0)
    for i in range(len(x)):
        v = np.float64(x[i])
        above += v if v >= 0 else 0.0
        below += 0.0 if v >= 0 else v
        negative += np.int32(x[i] < 0)
    return above, below, negative


def _plain_signs(x: Any, out: Any, sums: Any) -> None:
    wide = x.astype(np.float64)
    above, below = wide >= 0, wide < 0
    out[: (len(x) + 7) // 8] = np.packbits(below, bitorder="little")
    # NaN is on neither side, but must appear in the sums.
    sums += np.where(above, wide, 0).sum(), np.where(above, 0, wide).sum(), np.count_nonzero(below)


@beside(_plain_signs)
def _signs(x: Any, out: Any, sums: Any) -> None:
    words = np.zeros(CHUNK // 8, np.uint64)
    codes = words.view(np.uint8)
    for begin in range(0, len(x), CHUNK):
        part = x[begin : begin + CHUNK]
        for i in range(len(part)):
            codes[i] = np.uint8(part[i] < 0)
        for i in range(len(part), min(CHUNK, (len(part) + 7) // 8 * 8)):
            codes[i] = 0
        eights = (len(part) + 7) // 8
        fold(words[:eights], 1, out[begin // 8 : begin // 8 + eights])
        above, below, negative = _side_sums(part)
        sums[0] += above
        sums[1] += below
        sums[2] += negative


def _plain_column_signs(x: Any, codes: Any, above: Any, below: Any, negative: Any) -> None:
    codes[:] = x < 0
    negative += np.count_nonzero(codes, axis=0).astype(np.int32)
    for row in x.astype(np.float64):  # one after the other, as the compiled loop adds them
        above += np.where(row >= 0, row, 0)
        below += np.where(row >= 0, 0, row)


@beside(_plain_column_signs)
def _column_signs(x: Any, codes: Any, above: Any, below: Any, negative: Any) -> None:
    for begin in range(0, x.shape[1], CHUNK // 2):
        end = min(begin + CHUNK // 2, x.shape[1])
        upper, lower, count = above[begin:end], below[begin:end], negative[begin:end]
        for r in range(len(x)):
            row, marks = x[r, begin:end], codes[r, begin:end]
            for c in range(len(row)):
                v = np.float64(row[c])
                upper[c] += v if v >= 0 else 0.0
                lower[c] += 0.0 if v >= 0 else v
            for c in range(len(row)):
                marks[c] = np.uint8(row[c] < 0)
                count[c] += np.int32(row[c] < 0)


def _plain_set_columns(codes: Any, high: Any, low: Any, out: Any, add: bool) -> None:
    values = np.where(codes, low, high)
    out[:] = out + values if add else values


@beside(_plain_set_columns)
def _set_columns(codes: Any, high: Any, low: Any, out: Any, add: bool) -> None:
    for r in range(len(out)):
        row, marks = out[r], codes[r]
        if add:
            for c in range(len(row)):
                row[c] += low[c] if marks[c] else high[c]
        else:
            for c in range(len(row)):
                row[c] = low[c] if marks[c] else high[c]


def _plain_set_sides(data: Any, high: Any, low: Any, out: Any, add: bool) -> None:
    values = np.where(np.unpackbits(data, count=len(out), bitorder="little"), low, high)
    out[:] = out + values if add else values


@beside(_plain_set_sides)
def _set_sides(data: Any, high: Any, low: Any, out: Any, add: bool) -> None:
    words = np.zeros(CHUNK // 8, np.uint64)
    codes = words.view(np.uint8)
    for begin in range(0, len(out), CHUNK):
        part = out[begin : begin + CHUNK]
        unfold(data[begin // 8 : (begin + len(part) + 7) // 8], 1, words[: (len(part) + 7) // 8])
        if add:
            for i in range(len(part)):
                part[i] += low if codes[i] else high
        else:
            for i in range(len(part)):
                part[i] = low if codes[i] else high


def _plain_less_sides(x: Any, high: Any, low: Any) -> None:
    x -= np.where(x < 0, low, high)


@beside(_plain_less_sides)
def _less_sides(x: Any, high: Any, low: Any) -> None:
    for i in range(len(x)):
        x[i] -= low if x[i] < 0 else high


def signs(x: FlatArray, added: FlatArray | None = None) -> tuple[Bytes, npt.NDArray[np.float64]]:
    """Return one bit per element, 1 if the element is below zero, and an array of three sums.

    The sums are: the sum of the elements ≥ 0, the sum of the elements < 0, and the number of elements < 0.

    If `added` is given, it is first added to `x` in place.
    """
    sums, out = np.zeros(3), np.empty((len(x) + 7) // 8, np.uint8)
    for begin in range(0, len(x), AT_ONCE):
        part = x[begin : begin + AT_ONCE]
        if added is not None:
            part += added[begin : begin + AT_ONCE]
        _signs(locked(part), out[begin // 8 :], sums)
    return out, sums


def column_signs(matrix: FlatArray, added: FlatArray | None = None) -> tuple[Bytes, npt.NDArray[np.float64]]:
    """Return, for each column of a row-major matrix, the sign bits and the three sums that `signs` returns: bits in row
    order, sums of shape (3, columns).
    """
    sums, codes = np.zeros((3, matrix.shape[1])), np.empty(matrix.shape, np.uint8)
    rows, negative = max(1, AT_ONCE // matrix.shape[1]), np.zeros(matrix.shape[1], np.int32)
    for begin in range(0, len(matrix), rows):
        part = matrix[begin : begin + rows]
        if added is not None:
            part += added[begin : begin + rows]
        _column_signs(locked(part), codes[begin : begin + rows], sums[0], sums[1], negative)
    sums[2] = negative
    return pack(codes.reshape(-1), 1), sums


def from_signs(data: Bytes, high: float, low: float, size: int, dtype: str) -> FlatArray:
    """Decode signs: return `low` for every bit 1 and `high` for every bit 0, as float32 or float64."""
    out = np.empty(size, dtype)
    _set_sides(locked(data), out.dtype.type(high), out.dtype.type(low), out, False)
    return out


def add_signs(data: Bytes, high: float, low: float, out: FlatArray) -> None:
    """Decode signs and add them to `out`, which is flat and contiguous: `low` for every bit 1, `high` for every bit
    0.
    """
    _set_sides(locked(data), out.dtype.type(high), out.dtype.type(low), out, True)


def less_sides(x: FlatArray, high: float, low: float) -> None:
    """Subtract, in place, `low` from the elements below zero and `high` from all other elements."""
    _less_sides(x, x.dtype.type(high), x.dtype.type(low))


def _plain_to_powers(words: Any, digits: Any, top: Any, seed: Any, low: Any, bits: int, scratch: Any, out: Any) -> Any:
    kind = words.dtype.type
    sign = kind(1 << (8 * words.itemsize - 1))
    magnitudes = words & kind(sign - kind(1))
    drawn = mixed(np.arange(len(words), dtype=np.uint32), seed) >> np.uint32(9)
    power = np.minimum((magnitudes + (drawn.astype(kind) << kind(digits - kind(23)))) >> digits, top)
    low[:] = power & kind(0xFF)
    rest = np.zeros((len(words) + 7) // 8 * 8, np.uint8)
    rest[: len(words)] = ((power >> kind(8)) << kind(1)) | ((words & sign) != 0)
    fold(rest.view(np.uint64), bits, out)
    return magnitudes.max(initial=0)


@beside(_plain_to_powers)
def _to_powers(words: Any, digits: Any, top: Any, seed: Any, low: Any, bits: int, scratch: Any, out: Any) -> Any:
    kind = words.dtype.type
    sign = kind(kind(1) << kind(8 * words.itemsize - 1))
    most, magnitude, shift = kind(0), kind(sign - kind(1)), kind(digits - kind(23))
    rest = scratch.view(np.uint8)
    for begin in range(0, len(words), CHUNK):
        part, lower = words[begin : begin + CHUNK], low[begin : begin + CHUNK]
        for i in range(len(part)):
            magnitudes = kind(part[i] & magnitude)
            most = max(most, magnitudes)
            carry = kind(kind(mixed(begin + i, seed) >> np.uint32(9)) << shift)
            power = min(kind(kind(magnitudes + carry) >> digits), top)
            lower[i] = np.uint8(power & kind(0xFF))
            rest[i] = np.uint8((power >> kind(8)) << kind(1)) | np.uint8(kind(part[i] & sign) != 0)
        for i in range(len(part), min(CHUNK, (len(part) + 7) // 8 * 8)):
            rest[i] = 0
        eights = (len(part) + 7) // 8
        fold(scratch[:eights], bits, out[begin // 8 * bits : (begin // 8 + eights) * bits])
    return most


def _plain_from_powers(low: Any, high: Any, bits: int, digits: Any, words: Any, out: Any, scale: Any, add: bool) -> Any:
    kind = words.dtype.type
    rest = unpack(high, len(low), bits).astype(kind)
    power = low.astype(kind) | ((rest >> kind(1)) << kind(8))
    found = (power << digits) | ((rest & kind(1)) << kind(8 * words.itemsize - 1))
    values = found.view(out.dtype) * scale
    out[:] = out + values if add else values
    return power.max(initial=0)


@beside(_plain_from_powers)
def _from_powers(low: Any, high: Any, bits: int, digits: Any, words: Any, out: Any, scale: Any, add: bool) -> Any:
    kind, scratch, floats = words.dtype.type, np.empty(CHUNK // 8, np.uint64), words.view(out.dtype)
    sign = kind(kind(8 * words.itemsize) - kind(1))
    rest, top = scratch.view(np.uint8), kind(0)
    for begin in range(0, len(low), CHUNK):
        lower, part = low[begin : begin + CHUNK], out[begin : begin + CHUNK]
        unfold(high[begin // 8 * bits : ((begin + len(lower)) * bits + 7) // 8], bits, scratch[: (len(lower) + 7) // 8])
        for i in range(len(lower)):
            power = kind(kind(lower[i]) | kind(kind(rest[i] >> np.uint8(1)) << kind(8)))
            top = max(top, power)
            words[i] = kind(kind(power << digits) | kind(kind(rest[i] & np.uint8(1)) << sign))
        if add:
            for i in range(len(part)):
                part[i] += floats[i] * scale
        else:
            for i in range(len(part)):
                part[i] = floats[i] * scale
    return top


def _word(dtype: Any) -> tuple[Any, int, int]:
    """Return the unsigned integer dtype of a float's size, its fraction's bits, and the bits beyond 8 of exponent and
    sign.
    """
    return (np.uint64, 52, 4) if dtype == np.float64 else (np.uint32, 23, 1)


def to_powers(x: FlatArray, top: int, seed: int) -> tuple[Bytes, Bytes, bool]:
    """Round every element stochastically to one of the two nearest powers of two, so that the mean is preserved.

    Returns:
        Three values: the low 8 bits of each exponent field, which is at most `top`; the other bits, packed, 1 bit per
        element (4 for float64), of which the lowest is the sign and the others are the higher exponent bits; and
        whether all elements are finite.
    """
    x = locked(x)
    kind, digits, bits = _word(x.dtype)
    low, high = np.empty(len(x), np.uint8), np.empty((len(x) + 7) // 8 * bits, np.uint8)
    scratch = np.empty(CHUNK // 8, np.uint64)
    most = _to_powers(x.view(kind), kind(digits), kind(top), np.uint32(seed), low, bits, scratch, high)
    return low, high[: packed_bytes(len(x), bits)], int(most) < int(np.array(np.inf, x.dtype).view(kind))


def add_powers(low: Bytes, high: Bytes, out: FlatArray, scale: float = 1.0, add: bool = True) -> int:
    """Decode powers of two, and add `scale` times each to `out`, or write them to `out` if `add` is False; return the
    largest exponent field.
    """
    kind, digits, bits = _word(out.dtype)
    words, factor = np.empty(CHUNK, kind), out.dtype.type(scale)
    return int(_from_powers(locked(low), locked(high), bits, kind(digits), words, out, factor, add))


def from_powers(low: Bytes, high: Bytes, dtype: str) -> tuple[FlatArray, int]:
    """Decode powers of two that `to_powers` encoded, as float32 or float64; also return the largest exponent field."""
    out = np.empty(len(low), dtype)
    return out, add_powers(low, high, out, add=False)


def side_means(sums: npt.NDArray[np.float64], rows: int, dtype: str) -> FlatArray:
    """Return, for each column of a matrix, the mean of its elements ≥ 0 and the mean of its elements < 0, as a (2,
    columns) array of `dtype`; `rows` is the number of rows.
    """
    counts = np.stack([rows - sums[2], sums[2]])
    with np.errstate(invalid="ignore"):
        means: FlatArray = (sums[:2] / np.maximum(counts, 1)).astype(dtype)
    return means


def from_column_signs(data: Bytes, means: FlatArray, size: int) -> FlatArray:
    """Decode the sign bits of a row-major matrix: an element becomes the first mean of its column, or the second mean
    if its bit is 1.
    """
    out = np.empty(size, means.dtype)
    _columns(data, means, out, False)
    return out


def add_column_signs(data: Bytes, means: FlatArray, out: FlatArray) -> None:
    """Decode the sign bits of a row-major matrix as `from_column_signs` does, and add the values to `out`, which is
    flat and contiguous.
    """
    _columns(data, means, out, True)


def _columns(data: Bytes, means: FlatArray, out: FlatArray, add: bool) -> None:
    width = means.shape[1]
    codes = unpack(data, len(out), 1).reshape(-1, width)
    _set_columns(codes, locked(means[0]), locked(means[1]), out.reshape(-1, width), add)
