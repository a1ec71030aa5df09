"""1-bit SGD: sends a sign for every element, the mean of the nonnegative elements and the mean of the negative
elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flockstep.arrays import kernels
from flockstep.arrays.namespace import copied, first_not_finite
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec, Shape
from flockstep.codecs.parts import Parts
from flockstep.codecs.quantizer import Quantizer, computed_in, scale_dtype


@dataclass(frozen=True)
class OneBit(Quantizer):
    """1-bit SGD (Seide et al. 2014, section 2.2): each x ≥ 0 becomes the mean of all elements ≥ 0, each x < 0 the mean
    of all elements < 0.

    Each column of a matrix has its own two means; any other tensor, and an array whose tensors are unknown, has two
    means. The sums of the elements ≥ 0 and of the elements < 0 are preserved. Use residual feedback: without it, what
    an encoding leaves out is lost. A column or tensor of d elements takes d + 64 bits.
    """

    contraction = True
    """The codec is a contraction with delta = 1/d for d elements: the two means preserve at least ‖x‖² / d."""

    def columns(self, size: int) -> int:
        """Return the number of groups of elements that have their own two means."""
        return 1

    def _head(self, size: int, dtype: str) -> int:
        return 2 * self.columns(size) * (8 if dtype == "float64" else 4) if size else 0

    def coded_bytes(self, size: int, dtype: str) -> int:
        return self._head(size, dtype) + (size + 7) // 8

    def coded(self, floats: FlatArray, random: np.random.Generator) -> Bytes:
        """Return the encoding: the means of the elements ≥ 0, the means of the elements < 0, and one sign bit per
        element.
        """
        k, columns = kernels.of(floats), self.columns(len(floats))
        bits, sums = k.signs(floats) if columns == 1 else k.column_signs(floats.reshape(-1, columns))
        return self._joined(floats, bits, self._means(floats, sums))

    def _means(self, floats: FlatArray, sums: FlatArray) -> FlatArray:
        k, columns = kernels.of(floats), self.columns(len(floats))
        means = k.side_means(sums.reshape(3, columns), len(floats) // columns, kernels.name_of(floats))
        self.refuse(floats, first_not_finite(means.reshape(-1)) >= 0)
        found: FlatArray = means
        return found

    def _joined(self, floats: FlatArray, bits: Bytes, means: FlatArray) -> Bytes:
        k = kernels.of(floats)
        data: Bytes = k.join(k.as_bytes(means.reshape(-1)), bits)
        return data

    def encode_residual(self, array: FlatArray, error: FlatArray, random: np.random.Generator) -> Bytes:
        """Encode `error + array` as the base class does, but compute the sums and the remainder in one pass each."""
        k, size, dtype = kernels.of(array), len(error), kernels.name_of(error)
        if not computed_in(error) or kernels.name_of(array) != dtype or self.as_it_is(size, dtype):
            return super().encode_residual(array, error, random)
        columns, flat = self.columns(size), array.reshape(-1)
        if columns > 1:
            bits, sums = k.column_signs(error.reshape(-1, columns), flat.reshape(-1, columns))
            means: Any = self._means(error, sums)
            k.add_column_signs(bits, -means, error)
        else:
            bits, sums = k.signs(error, flat)
            means = self._means(error, sums)
            k.less_sides(error, *means.reshape(-1).tolist())
        return self._joined(error, bits, means)

    def _read(self, data: Bytes, size: int, dtype: str) -> tuple[Any, Bytes]:
        """Return the means, of shape (2, columns), and the packed signs.

        Raises:
            ProtocolError: a mean is not finite or has the wrong sign.
        """
        k, head = kernels.of(data), self._head(size, dtype)
        means = copied(k.from_bytes(data[:head], dtype)).reshape(2, -1)
        sound = first_not_finite(means.reshape(-1)) < 0 and bool((means[0] >= 0).all() and (means[1] <= 0).all())
        self.require(sound, size, dtype)
        return means, data[head:]

    def uncoded(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        """Return an array in which each element is the mean that replaces it, that of the elements ≥ 0 or that of the
        elements < 0.
        """
        means, bits = self._read(data, size, dtype)
        k = kernels.of(data)
        columns: FlatArray = (
            k.from_column_signs(bits, means, size)
            if self.columns(size) > 1
            else k.from_signs(bits, *means.reshape(-1).tolist(), size, dtype)
        )
        return columns

    def add_uncoded(self, data: Bytes, out: FlatArray, scale: float) -> None:
        k = kernels.of(data)
        means, bits = self._read(data, len(out), kernels.name_of(out))
        if self.columns(len(out)) > 1:
            k.add_column_signs(bits, means * scale, out)
        else:
            k.add_signs(bits, *(scale * mean for mean in means.reshape(-1).tolist()), out)

    def error_bound(self, array: FlatArray) -> float:
        """Return the exact error: the sum of the squared differences between each element and the mean that replaces
        it.
        """
        if self.as_it_is(array.size, kernels.name_of(array)):
            return 0.0
        x = array.astype(np.float64).reshape(-1, self.columns(array.size))
        means = kernels.of(x).side_means(kernels.of(x).column_signs(x)[1], len(x), scale_dtype(array.dtype.name))
        return float(np.sum(np.square(x - np.where(x >= 0, *means.astype(np.float64)))))

    def bind_shapes(self, shapes: Sequence[Shape]) -> Codec:
        """Return the codec that encodes tensors separately, and matrices column by column."""
        columns = (OneBitColumns(shape[1]) if len(shape) == 2 and shape[1] > 1 else self for shape in shapes)
        return Parts.of(columns, shapes)


@dataclass(frozen=True)
class OneBitColumns(OneBit):
    """1-bit SGD of a row-major matrix of `width` columns; an array that is not such a matrix has two means."""

    width: int = 1

    def columns(self, size: int) -> int:
        """Return the number of columns of the matrix, each of which has its own two means."""
        return 1 if size % self.width else self.width
