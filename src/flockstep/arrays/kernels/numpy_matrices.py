"""Low-rank factors and cosine transforms of matrices, for numpy."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from flockstep.arrays.kernels import numpy_dtype
from flockstep.arrays.kernels.jit import beside, fast
from flockstep.arrays.kernels.numpy_bits import locked, pack, unpack
from flockstep.arrays.schema import FlatArray

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]

SPARE = 0x5BA2E
"""Seed of the random vectors that replace linearly dependent columns when a basis is made orthonormal."""
DEPENDENT = 16
"""Factor on the dtype's machine precision. A column counts as linearly dependent if the part of the column outside the
span of earlier columns is at most this factor times the precision, relative to the norm of the column.
"""
BLOCK = 1 << 14
"""Number of elements of a product that are computed at a time; small enough for the L1 cache."""


def gaussian(like: FlatArray, rows: int, columns: int, seed: int | tuple[int, ...]) -> FlatArray:
    """Return an array (rows, columns) of standard normal numbers in the dtype of `like`; equal seeds give equal
    numbers.
    """
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(like.dtype)


def times(matrix: FlatArray, columns: FlatArray) -> FlatArray:
    """Return the product of a contiguous matrix (n, m) and a few columns (m, r), from one pass over the matrix."""
    out = np.empty((len(matrix), columns.shape[1]), matrix.dtype)
    _times(locked(matrix), columns.T.copy(), out)
    return out


def _plain_times(matrix: Any, columns: Any, out: Any) -> None:
    np.matmul(matrix, columns.T, out=out)


@beside(_plain_times, fast)
def _times(matrix: Any, columns: Any, out: Any) -> None:
    for i in range(len(matrix)):
        for k in range(len(columns)):
            total = matrix.dtype.type(0)
            for j in range(matrix.shape[1]):
                total += matrix[i, j] * columns[k, j]
            out[i, k] = total


def times_transposed(matrix: FlatArray, columns: FlatArray) -> FlatArray:
    """Return the product of the transpose of a contiguous matrix (n, m) and a few columns (n, r), from one pass over
    the matrix.
    """
    out = np.zeros((columns.shape[1], matrix.shape[1]), matrix.dtype)
    _times_transposed(locked(matrix), columns.copy(), out)
    return out.T


def _plain_times_transposed(matrix: Any, columns: Any, out: Any) -> None:
    np.matmul(columns.T, matrix, out=out)


@beside(_plain_times_transposed)
def _times_transposed(matrix: Any, columns: Any, out: Any) -> None:
    for i in range(len(matrix)):
        for k in range(len(out)):
            factor, row = columns[i, k], out[k]
            for j in range(matrix.shape[1]):
                row[j] += matrix[i, j] * factor


def orthonormal(matrix: FlatArray) -> FlatArray:
    """Return an orthonormal basis (n, r), r ≤ n, whose first columns span those of `matrix`, in the dtype of `matrix`.

    This is Gram-Schmidt in float64, applied twice. A column that depends on earlier columns is replaced by a fixed
    arbitrary direction, made orthogonal to them. The same matrix gives the same bits, whatever its memory layout.
    """
    basis, least = np.zeros(matrix.shape[::-1]), DEPENDENT * float(np.finfo(matrix.dtype).eps)
    for index, column in enumerate(matrix.T.astype(np.float64)):
        largest = np.abs(column).max(initial=0)
        if largest:
            column /= largest  # so that no square overflows
        size, column = norm(column), _without(column, basis[:index])
        attempt = 0
        while norm(column) <= least * size:
            spare = np.random.default_rng((SPARE, index, attempt)).standard_normal(len(column))
            size, column = norm(spare), _without(spare, basis[:index])
            attempt += 1
        basis[index] = column / norm(column)
    return np.ascontiguousarray(basis.T).astype(matrix.dtype)


def _without(column: FlatArray, basis: FlatArray) -> FlatArray:
    """Return the part of `column` that is orthogonal to the rows of `basis`."""
    for _ in range(2):
        for row in basis:
            column = column - np.sum(row * column) * row
    return column


def norm(array: FlatArray) -> float:
    """Return the Euclidean norm of all elements of an array."""
    return float(np.sqrt(np.sum(np.square(array))))


def add_product(left: FlatArray, right: FlatArray, out: FlatArray, scale: float = 1.0) -> None:
    """Add scale · left (n, r) rightᵀ (r, m) to `out` (n·m,), every element of the product summed in the order of the
    columns.

    Values beyond the range of the dtype of `out` become infinite.
    """
    add = _add_product if out.dtype == left.dtype else _plain_add_product
    with np.errstate(over="ignore", invalid="ignore"):
        add(left.copy(), right.T.copy(), out, left.dtype.type(scale))  # copies are aligned and contiguous


def _plain_add_product(left: Any, columns: Any, out: Any, scale: Any) -> None:
    step, width = max(1, BLOCK // max(1, columns.shape[1])), columns.shape[1]
    for start in range(0, len(left), step):
        rows = left[start : start + step]
        block = rows[:, :1] * columns[0]
        for index in range(1, len(columns)):
            block += rows[:, index : index + 1] * columns[index]
        out[start * width : (start + step) * width] += (block * scale).reshape(-1).astype(out.dtype, copy=False)


@beside(_plain_add_product)
def _add_product(left: Any, columns: Any, out: Any, scale: Any) -> None:
    rank, width = columns.shape
    block = np.empty(width, columns.dtype)
    for i in range(len(left)):
        row = out[i * width : (i + 1) * width]
        for j in range(width):
            block[j] = left[i, 0] * columns[0, j]
        for k in range(1, rank):
            factor, column = left[i, k], columns[k]
            for j in range(width):
                block[j] += factor * column[j]
        for j in range(width):
            row[j] += block[j] * scale


@lru_cache(maxsize=256)
def _cosines(size: int, dtype: str) -> FlatArray:
    position = (2 * np.arange(size) + 1) * np.pi / (2 * size)
    matrix = np.cos(np.arange(size)[:, None] * position) * np.sqrt(2 / size)
    matrix[0] /= np.sqrt(2)
    fixed: FlatArray = matrix.astype(numpy_dtype(dtype))
    fixed.flags.writeable = False
    return fixed


def cosines(like: FlatArray, size: int) -> FlatArray:
    """Return the read-only matrix (size, size) of the orthonormal DCT-II in the dtype of `like`; each row is one
    frequency.
    """
    return _cosines(size, like.dtype.name)


def tiles(matrix: FlatArray, height: int, width: int) -> FlatArray:
    """Cut a matrix into tiles, left to right and top to bottom; return a copy of shape (tiles, height, width)."""
    rows, columns = matrix.shape
    cut = matrix.reshape(rows // height, height, columns // width, width)
    return np.ascontiguousarray(cut.transpose(0, 2, 1, 3)).reshape(-1, height, width)


def untiled(tiles: FlatArray, rows: int, columns: int) -> FlatArray:
    """Return the matrix that has the given tiles, left to right and top to bottom; the inverse of `tiles`."""
    height, width = tiles.shape[1:]
    cut = tiles.reshape(rows // height, columns // width, height, width)
    return cut.transpose(0, 2, 1, 3).reshape(rows, columns)


def packed_integers(numbers: Integers, bits: int) -> Bytes:
    """Pack flat integers from 0 to 2^bits - 1 into `bits` bits each, lowest bit first; the last byte is filled up with
    zero bits.
    """
    if 1 <= bits <= 8:
        return pack(numbers.astype(np.uint8), bits)
    ones = np.unpackbits(numbers.astype("<u4").view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    return np.packbits(ones[:, :bits].reshape(-1), bitorder="little")


def unpacked_integers(data: Bytes, count: int, bits: int) -> Integers:
    """Return the first `count` integers of `bits` bits each that `packed_integers` has packed into `data`."""
    if 1 <= bits <= 8:
        return unpack(data, count, bits).astype(np.int64)
    ones = np.zeros((count, 32), np.uint8)
    ones[:, :bits] = np.unpackbits(data, count=count * bits, bitorder="little").reshape(count, bits)
    return np.packbits(ones, axis=1, bitorder="little").view("<u4").reshape(-1).astype(np.int64)
