"""Cuts tensors into the chunks of a cosine transform, and computes the transform."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from flockstep.arrays import kernels
from flockstep.arrays.kernels import numpy_dtype
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Shape
from flockstep.codecs.low_rank import factor_dtype


@dataclass(frozen=True)
class Tiling:
    """The division of a tensor, as a matrix (rows, columns), into chunks (height, width), and the part of each chunk
    that is sent.
    """

    part: slice
    rows: int
    columns: int
    height: int
    width: int
    kept: int
    """Number of coefficients that are sent from each chunk; 0 if the tensor is sent unchanged."""

    @property
    def area(self) -> int:
        """Number of elements of a chunk."""
        return self.height * self.width

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Number of coefficients that are sent from each chunk."""
        return np.full(self.rows * self.columns // max(1, self.area), self.kept)

    @property
    def sent(self) -> int:
        """Number of coefficients that are sent from the whole tensor."""
        return self.rows * self.columns // max(1, self.area) * self.kept

    @property
    def bits(self) -> int:
        """Number of bits of an index into a chunk."""
        return (self.area - 1).bit_length()

    @property
    def index_bytes(self) -> int:
        """Number of bytes of all indices of the tensor."""
        return (self.sent * self.bits + 7) // 8

    def wire_bytes(self, dtype: str) -> int:
        """Return the number of bytes of the tensor's encoding: indices and values, or all elements if the tensor is
        sent unchanged.
        """
        if not self.kept:
            return self.rows * self.columns * numpy_dtype(dtype).itemsize
        return self.index_bytes + self.sent * factor_dtype(dtype).itemsize


@lru_cache(maxsize=1024)
def tilings(shapes: tuple[Shape, ...], k: int, chunk: int, dtype: str) -> tuple[Tiling, ...]:
    """Return the tilings of tensors of these shapes, in order.

    A tensor for which `k` coefficients per chunk take no fewer bytes than its elements is sent unchanged.
    """
    found, start = [], 0
    for shape in shapes:
        size = math.prod(shape)
        rows = shape[0] if len(shape) > 1 and size else 1
        columns, height = size // rows, _side(rows, chunk) if len(shape) > 1 else 1
        width = _side(columns, chunk)
        tiling = Tiling(slice(start, start + size), rows, columns, height, width, min(k, height * width))
        whole = Tiling(tiling.part, rows, columns, height, width, 0)
        found.append(tiling if tiling.wire_bytes(dtype) < whole.wire_bytes(dtype) else whole)
        start += size
    return tuple(found)


def _side(size: int, chunk: int) -> int:
    """Return the largest divisor of `size` that is at most `chunk`."""
    return max((d for d in range(1, min(size, chunk) + 1) if size % d == 0), default=1)


def transformed(tiles: FlatArray) -> FlatArray:
    """Return the orthonormal DCT-II of every tile: an array (tiles, height · width) for `tiles` of shape (tiles,
    height, width).
    """
    count, height, width = tiles.shape
    k = kernels.of(tiles)
    along = (tiles.reshape(-1, width) @ k.cosines(tiles, width).T).reshape(count, height, width)
    spectrum: FlatArray = along if height == 1 else k.cosines(tiles, height) @ along
    return spectrum.reshape(count, -1)


def restored(spectrum: FlatArray, height: int, width: int) -> FlatArray:
    """Return the tiles (tiles, height, width) whose DCT-II is `spectrum` (tiles, height · width)."""
    k, count = kernels.of(spectrum), len(spectrum)
    tiles: FlatArray = (spectrum.reshape(-1, width) @ k.cosines(spectrum, width)).reshape(count, height, width)
    return tiles if height == 1 else k.cosines(tiles, height).T @ tiles
