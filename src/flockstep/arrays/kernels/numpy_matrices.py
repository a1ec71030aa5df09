"""Low-rank factors and cosine transforms of matrices, for numpy."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from flockstep.arrays.kernels import numpy_dtype
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
    step, width = max(1, BLOCK // max(1, len(right))), len(right)
    columns = np.ascontiguousarray(right.T)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(left), step):
            rows = left[start : start + step]
            block = rows[:, :1] * columns[0]
            for index in range(1, len(columns)):
                block += rows[:, index : index + 1] * columns[index]
            if scale != 1:
                block *= block.dtype.type(scale)
            out[start * width : (start + step) * width] += block.reshape(-1).astype(out.dtype, copy=False)


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


def largest_of_rows(array: FlatArray, count: int) -> Integers:
    """Return for every row the ascending positions of the `count` elements of largest magnitude, of shape (rows,
    count).

    Of equal magnitudes the first is chosen.
    """
    rows, size = array.shape
    if count >= size:
        return np.broadcast_to(np.arange(size), (rows, size)).copy()
    magnitude = np.abs(array)
    least = np.partition(magnitude, size - count, axis=1)[:, size - count, None]
    chosen = magnitude >= least
    for row in np.flatnonzero(np.count_nonzero(chosen, axis=1) > count):
        above, equal = magnitude[row] > least[row], magnitude[row] == least[row]
        chosen[row] = above | (equal & (np.cumsum(equal) <= count - np.count_nonzero(above)))
    return np.nonzero(chosen)[1].reshape(rows, count)


def placed(spots: Integers, values: FlatArray, size: int) -> FlatArray:
    """Return a matrix (rows, size) that has `values` (rows, count) at the positions `spots` (rows, count) and zeros
    elsewhere.
    """
    out: FlatArray = np.zeros((len(spots), size), values.dtype)
    np.put_along_axis(out, spots, values, axis=1)
    return out


def taken(array: FlatArray, spots: Integers) -> FlatArray:
    """Return the elements of a matrix at the column positions `spots` (rows, count) of each row, in an array (rows,
    count).
    """
    return np.take_along_axis(array, spots, axis=1)


def packed_integers(numbers: Integers, bits: int) -> Bytes:
    """Pack flat integers from 0 to 2^bits - 1 into `bits` bits each, lowest bit first; the last byte is filled up with
    zero bits.
    """
    ones = np.unpackbits(numbers.astype("<u4").view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    return np.packbits(ones[:, :bits].reshape(-1), bitorder="little")


def unpacked_integers(data: Bytes, count: int, bits: int) -> Integers:
    """Return the first `count` integers of `bits` bits each that `packed_integers` has packed into `data`."""
    ones = np.zeros((count, 32), np.uint8)
    ones[:, :bits] = np.unpackbits(data, count=count * bits, bitorder="little").reshape(count, bits)
    return np.packbits(ones, axis=1, bitorder="little").view("<u4").reshape(-1).astype(np.int64)
