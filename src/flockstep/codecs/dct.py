"""DeMo's compressor: sends the largest coefficients of a cosine transform, chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from flockstep.arrays import kernels
from flockstep.arrays.namespace import cast, first_not_finite
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec, Shape
from flockstep.codecs.low_rank import factor_dtype, not_finite
from flockstep.codecs.tiling import Tiling, restored, tilings, transformed
from flockstep.errors import ProtocolError, require


@dataclass(frozen=True)
class Dct(Codec):
    """DeMo's codec (Peng, Quesnelle & Kingma 2024, section 3): the `k` largest DCT-II coefficients of every chunk.

    Tensors of more than one dimension are matrices whose rows are their first dimension, cut into chunk × chunk blocks;
    other tensors are cut into chunks of one row. As in the authors' code, a chunk's side is the largest divisor of the
    tensor's side that is at most `chunk`, so nothing is padded, and a side of prime length above `chunk` has chunks of
    length one. Of every chunk, k indices are sent, in the fewest whole bits, and k values as float32 (float64 for
    float64 arrays). A tensor whose encoding takes no fewer bytes than its elements is sent unchanged.
    """

    k: int = 32
    chunk: int = 64

    def __post_init__(self) -> None:
        for name, usual in (("k", 32), ("chunk", 64)):
            require(getattr(self, name) >= 1, name, ">= 1", getattr(self, name), f"{usual} is usual")

    contraction = True
    """The codec is a contraction with delta = k / (elements of a chunk): the transform preserves norms (Parseval)."""

    def shapes_of(self, size: int) -> tuple[Shape, ...]:
        """Return the shapes of the tensors in an array of the given size."""
        return ((size,),)

    def tilings(self, size: int, dtype: str) -> tuple[Tiling, ...]:
        """Return, for each tensor of an array of the given size, its division into chunks."""
        return tilings(self.shapes_of(size), self.k, self.chunk, dtype)

    def wire_bytes(self, size: int, dtype: str) -> int:
        return sum(t.wire_bytes(dtype) for t in self.tilings(size, dtype))

    def encode(self, array: FlatArray, random: np.random.Generator) -> Bytes:
        """Encode each tensor in turn: the indices of all chunks, then the values."""
        k, flat = kernels.of(array), array.reshape(-1)
        pieces = [k.as_bytes(flat[:0])] * 2
        for t in self.tilings(len(flat), kernels.name_of(flat)):
            if not t.kept:
                pieces.append(k.as_bytes(flat[t.part]))
                continue
            with np.errstate(over="ignore", invalid="ignore"):  # checked below
                matrix = k.as_floats(flat[t.part]).reshape(t.rows, t.columns)
                spectrum = transformed(k.tiles(matrix, t.height, t.width)).reshape(-1)
            if first_not_finite(spectrum) >= 0:
                raise not_finite("dct", flat, t.part)
            spots = k.largest_of_buckets(spectrum, t.area, t.counts)
            pieces.append(k.packed_integers(k.within_buckets(spots, t.area), t.bits))
            pieces.append(k.as_bytes(k.gathered(spectrum, spots)))
        joined: Bytes = k.join(*pieces)
        return joined

    def decode(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        """Apply the inverse transform to the coefficients that were sent.

        Raises:
            ProtocolError: wrong length, an index beyond its chunk or out of order, a value that is not finite.
        """
        k = kernels.of(data)
        parts = [k.from_bytes(data[:0], dtype)] * 2
        for t, piece in self._split(data, size, dtype):
            if not t.kept:
                parts.append(k.from_bytes(piece, dtype))
                continue
            places = k.unpacked_integers(piece[: t.index_bytes], t.sent, t.bits)
            values = k.from_bytes(piece[t.index_bytes :], factor_dtype(dtype).name)
            spots, elements = k.from_buckets(places, t.area, t.counts), t.rows * t.columns
            ordered = int(places.max()) < t.area and k.ascending(spots, elements)
            if not ordered or first_not_finite(values) >= 0:
                raise ProtocolError(f"dct got impossible coefficients for {size} elements of {dtype}")
            with np.errstate(over="ignore", invalid="ignore"):
                tiles = restored(k.scattered(spots, values, elements).reshape(-1, t.area), t.height, t.width)
                parts.append(cast(k.untiled(tiles, t.rows, t.columns).reshape(-1), dtype, copy=False))
        joined: FlatArray = k.join(*parts)
        return joined

    def _split(self, data: Bytes, size: int, dtype: str) -> Iterator[tuple[Tiling, Bytes]]:
        """Yield each tensor's tiling and bytes."""
        if len(data) != self.wire_bytes(size, dtype):
            raise ProtocolError(
                f"dct needs {self.wire_bytes(size, dtype)} bytes for {size} elements of {dtype}, got {len(data)}"
            )
        begin = 0
        for t in self.tilings(size, dtype):
            yield t, data[begin : begin + t.wire_bytes(dtype)]
            begin += t.wire_bytes(dtype)

    def error_bound(self, array: FlatArray) -> float:
        """Return an upper bound on the error: the sum over the tensors of (1 - k / (elements of a chunk)) ‖x‖²."""
        flat, total = array.reshape(-1).astype(np.float64), 0.0
        for t in self.tilings(len(flat), array.dtype.name):
            if t.kept:
                total += (1 - t.kept / t.area) * float(np.sum(np.square(flat[t.part])))
        return total

    def bind_shapes(self, shapes: Sequence[Shape]) -> Codec:
        """Return the codec that transforms each tensor of these shapes separately."""
        return ShapedDct(self.k, self.chunk, tuple(shapes))

    def exact_parts(self, size: int) -> list[slice]:
        """Return the slices of the array whose tensors are sent unchanged, whatever the dtype."""
        return [t.part for t in self.tilings(size, "float64") if not t.kept]


@dataclass(frozen=True)
class ShapedDct(Dct):
    """DeMo's compressor for arrays that are concatenated tensors of the given shapes."""

    shapes: tuple[Shape, ...] = ()

    def shapes_of(self, size: int) -> tuple[Shape, ...]:
        """Return the shapes of the tensors, if they make up an array of the given size; otherwise the array counts as
        one tensor.
        """
        return self.shapes if sum(map(math.prod, self.shapes)) == size else super().shapes_of(size)
