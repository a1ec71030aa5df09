"""What codecs that send only some of the elements have in common."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, Self

import numpy as np

from flockstep.arrays import kernels
from flockstep.arrays.namespace import first_not_finite
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.codecs.streamed import Indices, Streamed, plain_bytes, refuse
from flockstep.errors import CompositionError


class Sparsifier(Streamed):
    """Some elements travel, with where they belong; the others become zero.

    On the wire: a head that says which elements, then their values in the array's dtype, or as the codec `values`
    encodes them. Where that would not be smaller than the array, the array itself is sent: as many bytes as the array
    has mean the array. A NaN or an infinity among what is chosen raises `Diverged`.

    `topk(0.01) + qsgd(4)` is `topk(0.01, values=qsgd(4))`. Under residual feedback an unbiased values codec's error is
    left out of what is kept (as in SparCML, Renggli et al. 2019), since it averages out; that of a biased
    one is kept. Where values are copied, what is decoded and what is kept add up to the array bit for bit.
    """

    values: Codec

    @abstractmethod
    def count(self, size: int) -> int:
        """How many of `size` elements are sent; at most, where the data decide."""

    @abstractmethod
    def head_bytes(self, size: int) -> int:
        """Bytes before the values; at most, where the data decide."""

    @abstractmethod
    def choose(self, array: FlatArray, random: np.random.Generator) -> tuple[Bytes, Indices]:
        """The head, and the ascending indices, of the elements of a flat array to send."""

    @abstractmethod
    def locate(self, data: Bytes, size: int) -> tuple[Indices, int]:
        """The ascending indices that an encoding's head says, and the head's length in bytes.

        Raises:
            ProtocolError: it is no head for `size` elements.
        """

    def factor(self, size: int) -> float:
        """What receivers multiply values with."""
        return 1.0

    def __add__(self, other: Codec) -> Self:
        """This choice of elements, whose values travel as `other` encodes them."""
        if not isinstance(other, Codec):
            return NotImplemented
        if isinstance(self.values, Sparsifier):
            return self._with(values=self.values + other)
        if not self.values.lossless:
            raise CompositionError(f"{self} encodes its values already; write {self._with(values=other)}")
        return self._with(values=other)

    @property
    def contraction(self) -> bool:
        """For unbiased values, as far as elements are left out: all that residual feedback keeps of the error."""
        return self.values.contraction or self.values.unbiased

    @property
    def exact_size(self) -> bool:
        """As of the values."""
        return self.values.exact_size

    @property
    def shares_seed(self) -> bool:
        """As of the values."""
        return self.values.shares_seed

    def wire_bytes(self, size: int, dtype: str) -> int:
        """Head and values, or the array itself where that is no more."""
        return min(plain_bytes(size, dtype), self.head_bytes(size) + self.values.wire_bytes(self.count(size), dtype))

    def encode(self, array: FlatArray, random: np.random.Generator) -> Bytes:
        """Head and values of what was chosen, or the array."""
        return self._sent(array.reshape(-1), random)[0]

    def encode_residual(self, array: FlatArray, error: FlatArray, random: np.random.Generator) -> Bytes:
        """As `encode` does for error + array; keeps what was not chosen, and a biased values codec's error."""
        if self.factor(len(error)) != 1:
            return super().encode_residual(array, error, random)
        k, dtype = kernels.of(error), kernels.name_of(error)
        error += array.reshape(-1)
        data, indices, head = self._sent(error, random)
        if indices is None:
            error[:] = 0
        elif self.values.unbiased:
            k.put(error, indices, None)
        else:
            decoded = self.values.decode(data[head:], len(indices), dtype)
            k.put(error, indices, k.gathered(error, indices) - decoded)
        return data

    def read(self, data: Bytes, size: int, dtype: str) -> tuple[Indices, FlatArray]:
        """From head and values.

        Raises:
            ProtocolError: either cannot be.
        """
        indices, head = self.locate(data, size)
        values, factor = self.values.decode(data[head:], len(indices), dtype), self.factor(size)
        return indices, values if factor == 1 else kernels.of(data).cast(values * factor, dtype)

    def error_bound(self, array: FlatArray) -> float:
        """All of ||x||², and what the values codec may add to it."""
        return self.left_out(array) + self.values.error_bound(array.reshape(-1))

    def left_out(self, array: FlatArray) -> float:
        """What the squared norm of the elements that are not sent is at most."""
        return float(np.sum(np.square(array.astype(np.float64))))

    def at(self, step: int) -> Codec:
        """With the values codec of that step."""
        return self._with(values=self.values.at(step))

    def _with(self, **changes: Any) -> Self:
        return replace(self, **changes)  # type: ignore[type-var]  # every class that is not abstract is a dataclass

    def _sent(self, flat: FlatArray, random: np.random.Generator) -> tuple[Bytes, Indices | None, int]:
        """The bytes for a flat array, the indices that they say (None: the array as it is), and the head's length."""
        k, dtype = kernels.of(flat), kernels.name_of(flat)
        plain = plain_bytes(len(flat), dtype)
        if not (self.exact_size and self.wire_bytes(len(flat), dtype) == plain):
            head, indices = self.choose(flat, random)
            kept = k.gathered(flat, indices)
            wrong = first_not_finite(kept)
            if wrong >= 0:
                raise refuse(self, float(kept[wrong]), int(indices[wrong]))
            data = k.join(head, self.values.encode(kept, random))
            if len(data) < plain:
                return data, indices, len(head)
        return k.as_bytes(k.copied(flat)), None, 0
