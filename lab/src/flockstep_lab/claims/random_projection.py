"""The unbiased low-rank compressor with which PowerSGD is compared in claim C7."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec, Shape
from flockstep.codecs.low_rank import LowRank
from flockstep.errors import ProtocolError


@dataclass(frozen=True)
class RandomProjection(Codec):
    """Sends M U for each matrix M, and decodes M U Uᵀ, with E[U Uᵀ] = I (Vogels, Karimireddy & Jaggi 2019, section
    4.1).

    The codec accepts float32 numpy arrays only. U has shape (m, rank) for a matrix of m columns, and normally
    distributed elements of variance 1 / rank. In each step, all workers draw the same U.
    """

    rank: int = 1
    shapes: tuple[Shape, ...] = ()
    step: int = 0

    unbiased = True
    """The codec is unbiased, because the expectation of U Uᵀ is the identity."""

    linear = True
    """The codec is linear, because the product with U is linear."""

    shares_seed = True
    """True, because all workers must draw the same U in a step."""

    def wire_bytes(self, size: int, dtype: str) -> int:
        """Return the encoded size in bytes: rank · n elements of 4 bytes for each matrix of n rows, and all elements
        of vectors.
        """
        layout = LowRank(self.shapes, self.rank)
        return 4 * (sum(m.rows * self.rank for m in layout.matrices) + layout.dense_size)

    def encode(self, array: FlatArray, random: np.random.Generator) -> Bytes:
        """Encode each matrix M as M U, followed by the unchanged vectors."""
        layout = LowRank(self.shapes, self.rank)
        products = [
            array[m.part].reshape(m.rows, m.columns) @ u
            for m, u in zip(layout.matrices, self._projections(layout), strict=True)
        ]
        parts = [*map(np.ravel, products), *(array[part] for part in layout.dense)]
        return np.concatenate(parts).astype(np.float32).view(np.uint8)

    def decode(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        """Decode each matrix as M U Uᵀ."""
        terms, layout = self.terms(data, size, dtype), LowRank(self.shapes, self.rank)
        decoded = np.empty(size, np.float32)
        for m, part, u in zip(layout.matrices, layout.lefts, self._projections(layout), strict=True):
            decoded[m.part] = (terms[part].reshape(-1, self.rank) @ u.T).ravel()
        start = len(terms) - layout.dense_size
        for dense in layout.dense:
            decoded[dense] = terms[start : start + dense.stop - dense.start]
            start += dense.stop - dense.start
        return decoded

    def terms(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        """Return the elements of the encoding, which may be added to the elements of other workers' encodings."""
        if len(data) != self.wire_bytes(size, dtype):
            raise ProtocolError(
                f"the encoding of a random projection has {self.wire_bytes(size, dtype)} bytes for these shapes, got "
                f"{len(data)}; encode and decode with the same rank and shapes"
            )
        return data.view(np.float32)

    def variance(self, size: int) -> float:
        """Return (m + 1) / rank for the widest matrix, which has m columns."""
        return (max((m.columns for m in LowRank(self.shapes, self.rank).matrices), default=0) + 1) / self.rank

    def error_bound(self, array: FlatArray) -> float:
        """Return an upper bound on the expected squared error: the variance bound times the squared norm of the
        array.
        """
        return self.variance(array.size) * float(np.sum(np.square(array.astype(np.float64))))

    def bind_shapes(self, shapes: Sequence[Shape]) -> Codec:
        return replace(self, shapes=tuple(shapes))

    def bind_step(self, step: int) -> Codec:
        """Return the codec for one step; the step determines the random matrices U."""
        return replace(self, step=step)

    def _projections(self, layout: LowRank) -> list[FlatArray]:
        random = np.random.default_rng((0x0B1A5ED, self.step))
        scale = self.rank**-0.5
        return [scale * random.standard_normal((m.columns, self.rank), dtype=np.float32) for m in layout.matrices]
