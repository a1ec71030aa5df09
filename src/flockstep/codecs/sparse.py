"""The base of codecs that send only some elements of an array."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, Self

import numpy as np

from flockstep.arrays import kernels
from flockstep.arrays.namespace import cast, copied, first_not_finite
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.codecs.streamed import Indices, Streamed, plain_bytes, refuse
from flockstep.errors import CompositionError


class Sparsifier(Streamed):
    """Sends some elements with their positions; the other elements decode to zero.

    The encoding holds a head, which determines the chosen elements, and their values in the array's dtype or as the
    codec `values` encodes them. If this encoding is not smaller than the array, the array itself is sent: data as long
    as the array is the array. A NaN or an infinity among the chosen elements raises `Diverged`.

    `topk(0.01) + qsgd(4)` is `topk(0.01, values=qsgd(4))`. Residual feedback does not keep the error of an unbiased
    values codec (as in SparCML, Renggli et al. 2019), because the error averages out; feedback keeps the error of a
    biased codec. If values are copied, the decoded array and the error kept add up to the array bit for bit.
    """

    values: Codec

    @abstractmethod
    def count(self, size: int) -> int:
        """Return the number of elements sent out of `size`; if the number depends on the data, the largest possible
        number.
        """

    @abstractmethod
    def head_bytes(self, size: int) -> int:
        """Return the number of bytes before the values, which determine the chosen elements; if the number depends on
        the data, the largest possible number.
        """

    @abstractmethod
    def choose(self, array: FlatArray, random: np.random.Generator) -> tuple[Bytes, Indices | None]:
        """Select the elements of a flat array to send; return the head of the encoding and the ascending indices, or
        None in place of the indices if the encoding would not be smaller than the array; then every NaN and infinity is
        among the elements.
        """

    @abstractmethod
    def locate(self, data: Bytes, size: int) -> tuple[Indices, int]:
        """Return the ascending indices that an encoding's head determines, and the head's length in bytes.

        Raises:
            ProtocolError: `data` has no valid head for `size` elements.
        """

    def factor(self, size: int) -> float:
        """Return the factor by which receivers multiply the values, for example 1."""
        return 1.0

    def __add__(self, other: Codec) -> Self:
        """Return the same choice of elements, with the values encoded by `other`."""
        if not isinstance(other, Codec):
            return NotImplemented
        if isinstance(self.values, Sparsifier):
            return self._with(values=self.values + other)
        if not self.values.lossless:
            raise CompositionError(
                f"{self} already encodes its values, so no second codec can be added; write {self._with(values=other)}"
            )
        return self._with(values=other)

    @property
    def contraction(self) -> bool:
        """Whether the values' codec is a contraction or unbiased; feedback does not keep the error of unbiased
        values.
        """
        return self.values.contraction or self.values.unbiased

    @property
    def exact_size(self) -> bool:
        return self.values.exact_size

    @property
    def shares_seed(self) -> bool:
        return self.values.shares_seed

    def wire_bytes(self, size: int, dtype: str) -> int:
        return min(plain_bytes(size, dtype), self.head_bytes(size) + self.values.wire_bytes(self.count(size), dtype))

    def encode(self, array: FlatArray, random: np.random.Generator) -> Bytes:
        return self._sent(array.reshape(-1), random)[0]

    def encode_residual(self, array: FlatArray, error: FlatArray, random: np.random.Generator) -> Bytes:
        """Encode error + array; `error` keeps the elements that were not chosen, and the error of a biased values
        codec.
        """
        if self.factor(len(error)) != 1:
            return super().encode_residual(array, error, random)
        k, dtype = kernels.of(error), kernels.name_of(error)
        error += array.reshape(-1)
        data, indices, head = self._sent(error, random)
        if indices is None:
            error[:] = 0
        elif self.values.unbiased:
            error[indices] = 0
        else:
            decoded = self.values.decode(data[head:], len(indices), dtype)
            k.scatter_add(error, indices, decoded, -1.0)
        return data

    def read(self, data: Bytes, size: int, dtype: str) -> tuple[Indices, FlatArray]:
        indices, head = self.locate(data, size)
        values, factor = self.values.decode(data[head:], len(indices), dtype), self.factor(size)
        return indices, values if factor == 1 else cast(values * factor, dtype, copy=False)

    def error_bound(self, array: FlatArray) -> float:
        """Return the squared norm of the elements left out plus the error bound of the values' codec."""
        return self.left_out(array) + self.values.error_bound(array.reshape(-1))

    def left_out(self, array: FlatArray) -> float:
        """Return an upper bound on the squared error caused by the elements that are not sent."""
        return float(np.sum(np.square(array.astype(np.float64))))

    def bind_step(self, step: int) -> Codec:
        return self._with(values=self.values.bind_step(step))

    def _with(self, **changes: Any) -> Self:
        return replace(self, **changes)  # type: ignore[type-var]  # every class that is not abstract is a dataclass

    def _sent(self, flat: FlatArray, random: np.random.Generator) -> tuple[Bytes, Indices | None, int]:
        """Return the encoding of a flat array, its indices (None if the array itself is sent), and the head's
        length.
        """
        k, dtype = kernels.of(flat), kernels.name_of(flat)
        plain = plain_bytes(len(flat), dtype)
        if not (self.exact_size and self.wire_bytes(len(flat), dtype) == plain):
            head, indices = self.choose(flat, random)
            kept = flat if indices is None else k.gathered(flat, indices)
            wrong = first_not_finite(kept)
            if wrong >= 0:
                raise refuse(self, float(kept[wrong]), wrong if indices is None else int(indices[wrong]))
            if indices is not None:
                data = k.join(head, self.values.encode(kept, random))
                if len(data) < plain:
                    return data, indices, len(head)
        return k.as_bytes(copied(flat)), None, 0
