"""PowerSGD's compressor: sends every matrix as the product of two thin factors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from flockstep.arrays import kernels
from flockstep.arrays.kernels import numpy_dtype, seed_from
from flockstep.arrays.namespace import cast, first_not_finite, zeros
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec, Shape
from flockstep.codecs.low_rank import LowRank, factor_dtype, low_rank, not_finite
from flockstep.errors import ProtocolError, require


@dataclass(frozen=True)
class PowerSgdCodec(Codec):
    """PowerSGD (Vogels, Karimireddy & Jaggi 2019, section 3): one step of subspace iteration from a random start.

    Every tensor of more than one dimension is a matrix M (n, m) whose rows are its first dimension. With Gaussian Ω, P
    ← orthonormal(M Ω) and Q ← Mᵀ P are sent, `rank`(n + m) elements of float32 (float64 for float64 arrays), and decode
    to P Qᵀ = P Pᵀ M. Tensors of one dimension, and matrices that are no larger than their factors, are sent unchanged;
    so is an array whose tensors are unknown. The strategy `power_sgd` starts from the Q of the previous step instead.
    """

    rank: int = 2

    def __post_init__(self) -> None:
        require(self.rank >= 1, "rank", ">= 1", self.rank, "the paper uses 1 to 4")

    contraction = True
    """The codec is a contraction with delta = rank / min(n, m), in expectation over Ω."""

    def layout(self, size: int, dtype: str) -> LowRank:
        """Return the layout of an array of the given size and dtype: which tensors are factored and which are sent
        dense.
        """
        return LowRank(((size,),), self.rank)

    def wire_bytes(self, size: int, dtype: str) -> int:
        layout = self.layout(size, dtype)
        factors = self.rank * sum(m.rows + m.columns for m in layout.matrices)
        return factors * factor_dtype(dtype).itemsize + layout.dense_size * numpy_dtype(dtype).itemsize

    def encode(self, array: FlatArray, random: np.random.Generator) -> Bytes:
        """Encode the factors P of all matrices, the factors Q of all matrices, then the elements that are not
        factored.
        """
        k, flat, seed = kernels.of(array), array.reshape(-1), seed_from(random)
        layout = self.layout(len(flat), kernels.name_of(flat))
        lefts, rights = [], []
        for index, m in enumerate(layout.matrices):
            matrix = k.as_floats(flat[m.part]).reshape(m.rows, m.columns)
            with np.errstate(over="ignore", invalid="ignore"):  # checked below
                lefts.append(k.orthonormal(k.times(matrix, k.gaussian(matrix, m.columns, self.rank, (seed, index)))))
                rights.append(k.times_transposed(matrix, lefts[-1]))
            if first_not_finite(rights[-1].reshape(-1)) >= 0:
                raise not_finite("powersgd", flat, m.part)
        dense = [k.as_bytes(flat[part]) for part in layout.dense]
        empty = k.as_bytes(flat[:0])
        joined: Bytes = k.join(empty, empty, *(k.as_bytes(f.reshape(-1)) for f in (*lefts, *rights)), *dense)
        return joined

    def decode(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        """Return the products of the factors, and the elements that are not factored.

        Raises:
            ProtocolError: the number of bytes is wrong for `size` elements, or a factor is not finite.
        """
        decoded: FlatArray = zeros(data, size, dtype=dtype)
        for part, piece in self._add_products(data, decoded, 1.0):
            decoded[part] = piece
        return decoded

    def add_decoded(self, data: Bytes, out: FlatArray, scale: float = 1.0) -> None:
        for part, piece in self._add_products(data, out, scale):
            with np.errstate(invalid="ignore"):  # NaN remains NaN
                out[part] += piece if scale == 1 else cast(piece * scale, kernels.name_of(out), copy=False)

    def _add_products(self, data: Bytes, out: FlatArray, scale: float) -> Iterator[tuple[slice, FlatArray]]:
        """Add the products of the factors to `out`; yield the dense slices and their elements."""
        k, dtype = kernels.of(out), kernels.name_of(out)
        layout = self.layout(len(out), dtype)
        lefts, rights, dense = self._split(data, layout, len(out), dtype)
        for m, p, q in zip(layout.matrices, lefts, rights, strict=True):
            k.add_product(p, q, out[m.part], scale)
        yield from zip(layout.dense, dense, strict=True)

    def _split(self, data: Bytes, layout: LowRank, size: int, dtype: str) -> tuple[list[FlatArray], ...]:
        """Return every P, every Q, and the dense elements."""
        if len(data) != self.wire_bytes(size, dtype):
            raise ProtocolError(
                f"powersgd needs {self.wire_bytes(size, dtype)} bytes for {size} elements of {dtype}, got {len(data)}"
            )
        k, wide = kernels.of(data), factor_dtype(dtype)
        begin, found = 0, []
        for parts in (layout.lefts, layout.rights):
            end = begin + sum(part.stop - part.start for part in parts) * wide.itemsize
            factors = k.from_bytes(data[begin:end], wide.name)
            if first_not_finite(factors) >= 0:
                raise ProtocolError(f"powersgd got a factor with a non-finite value, for {size} elements of {dtype}")
            found.append([factors[part].reshape(-1, self.rank) for part in parts])
            begin = end
        dense = k.from_bytes(data[begin:], dtype)
        starts = accumulate([0, *(part.stop - part.start for part in layout.dense)])
        return *found, [dense[a:b] for a, b in pairwise(starts)]

    def error_bound(self, array: FlatArray) -> float:
        """Return an upper bound on the expected error: (1 - rank / min(n, m)) ‖M‖² for every matrix M (n, m).

        In expectation a Gaussian column captures 1/rank(M) of the energy, because it weighs directions by their
        singular values. The remainder has one direction less, of which the next column captures the corresponding
        share.
        """
        flat, total = array.reshape(-1).astype(np.float64), 0.0
        for m in self.layout(len(flat), array.dtype.name).matrices:
            total += (1 - self.rank / min(m.rows, m.columns)) * float(np.sum(np.square(flat[m.part])))
        return total

    def bind_shapes(self, shapes: Sequence[Shape]) -> Codec:
        """Return the codec that factors the matrices among these tensors."""
        return ShapedPowerSgd(self.rank, tuple(shapes))

    def exact_parts(self, size: int) -> list[slice]:
        """Return the slices that are sent unchanged for every dtype, because their tensors are not factored."""
        return list(self.layout(size, "float64").dense)


@dataclass(frozen=True)
class ShapedPowerSgd(PowerSgdCodec):
    """PowerSGD's compressor for arrays that are concatenated tensors of the given shapes."""

    shapes: tuple[Shape, ...] = ()

    def layout(self, size: int, dtype: str) -> LowRank:
        """Return the layout of tensors of the given shapes; in an array of another size, nothing is factored."""
        whole = low_rank(self.shapes, self.rank, factor_dtype(dtype).itemsize / numpy_dtype(dtype).itemsize)
        return whole if whole.size == size else super().layout(size, dtype)
