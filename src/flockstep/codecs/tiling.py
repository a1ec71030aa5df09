"""How tensors are cut into the chunks of a cosine transform, and the transform itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from flockstep.arrays import kernels
from flockstep.arrays.kernels import numpy_dtype
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Shape
from flockstep.codecs.low_rank import factor_dtype


@dataclass(frozen=True)
class Tiling:
    """How a tensor, as a matrix (rows, columns), is cut into chunks (height, width), and how much of each is sent."""

    part: slice
    rows: int
    columns: int
    height: int
    width: int
    kept: int
    """Coefficients of each chunk that are sent; 0: the tensor travels as it is."""

    @property
    def area(self) -> int:
        """Elements of a chunk."""
        return self.height * self.width

    @property
    def sent(self) -> int:
        """Coefficients that are sent."""
        return self.rows * self.columns // max(1, self.area) * self.kept

    @property
    def bits(self) -> int:
        """Bits of an index."""
        return (self.area - 1).bit_length()

    @property
    def index_bytes(self) -> int:
        """Bytes of all indices."""
        return (self.sent * self.bits + 7) // 8

    def wire_bytes(self, dtype: str) -> int:
        """Indices and values, or the elements of what travels as it is."""
        if not self.kept:
            return self.rows * self.columns * numpy_dtype(dtype).itemsize
        return self.index_bytes + self.sent * factor_dtype(dtype).itemsize


@lru_cache(maxsize=1024)
def tilings(shapes: tuple[Shape, ...], k: int, chunk: int, dtype: str) -> tuple[Tiling, ...]:
    """How tensors of these shapes are cut, in order; as they are where `k` coefficients a chunk are no fewer bytes."""
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
    """The largest divisor that is no larger than `chunk`."""
    return max((d for d in range(1, min(size, chunk) + 1) if size % d == 0), default=1)


def transformed(tiles: FlatArray) -> FlatArray:
    """The orthonormal DCT-II of every tile (tiles, height, width), flat: (tiles, height · width)."""
    count, height, width = tiles.shape
    k = kernels.of(tiles)
    along = (tiles.reshape(-1, width) @ k.cosines(tiles, width).T).reshape(count, height, width)
    spectrum: FlatArray = along if height == 1 else k.cosines(tiles, height) @ along
    return spectrum.reshape(count, -1)


def restored(spectrum: FlatArray, height: int, width: int) -> FlatArray:
    """The tiles (tiles, height, width) of which `spectrum` (tiles, height · width) is the transform."""
    k, count = kernels.of(spectrum), len(spectrum)
    tiles: FlatArray = (spectrum.reshape(-1, width) @ k.cosines(spectrum, width)).reshape(count, height, width)
    return tiles if height == 1 else k.cosines(tiles, height).T @ tiles
