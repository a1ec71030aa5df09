"""Damped: an unbiased codec, scaled down so that it becomes a contraction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from flockstep.arrays.kernels import name_of
from flockstep.arrays.namespace import cast
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec, Shape
from flockstep.codecs.parts import Parts
from flockstep.errors import CompositionError


@dataclass(frozen=True)
class Damped(Codec):
    """The array C(x) / (1 + omega), for an unbiased codec C with E||C(x) - x||² ≤ omega ||x||².

    E||x - C(x) / (1 + omega)||² ≤ omega / (1 + omega) ||x||² (Richtárik, Sokolov & Fatkhullin 2021, lemma 8): the
    damped codec is a contraction, which error feedback needs. It sends the bytes of C, and the receiver divides by 1 +
    omega.
    """

    codec: Codec

    def __post_init__(self) -> None:
        if self.codec.variance(1) is None:
            raise CompositionError(
                f"damped needs an unbiased codec whose variance has a bound, got {self.codec}; use this codec without "
                "damped"
            )

    contraction = True
    """The codec is a contraction with delta = 1 / (1 + omega)."""

    @property
    def exact_size(self) -> bool:
        return self.codec.exact_size

    @property
    def shares_seed(self) -> bool:
        return self.codec.shares_seed

    def factor(self, size: int) -> float:
        """Return 1 / (1 + omega) for arrays of `size` elements."""
        omega = self.codec.variance(size)
        assert omega is not None
        return 1 / (1 + omega)

    def wire_bytes(self, size: int, dtype: str) -> int:
        return self.codec.wire_bytes(size, dtype)

    def encode(self, array: FlatArray, random: np.random.Generator) -> Bytes:
        return self.codec.encode(array, random)

    def decode(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        """Return the array that the codec decodes, divided by 1 + omega."""
        decoded = self.codec.decode(data, size, dtype)
        shrunk: FlatArray = cast(decoded * self.factor(size), dtype, copy=False)
        return shrunk

    def add_decoded(self, data: Bytes, out: FlatArray, scale: float = 1.0) -> None:
        self.codec.add_decoded(data, out, scale * self.factor(len(out)))

    def encode_residual(self, array: FlatArray, error: FlatArray, random: np.random.Generator) -> Bytes:
        """Encode `error + array` as the base class does, but subtract `decode`, which rounds after the division."""
        error += array.reshape(-1)
        data = self.encode(error, random)
        error -= self.decode(data, len(error), name_of(error))
        return data

    def error_bound(self, array: FlatArray) -> float:
        """Return the upper bound on the error: omega / (1 + omega) ||x||²."""
        return (1 - self.factor(array.size)) * float(np.sum(np.square(array.astype(np.float64))))

    def sparse_parts(self, size: int) -> list[slice]:
        return self.codec.sparse_parts(size)

    def bind_shapes(self, shapes: Sequence[Shape]) -> Codec:
        return replace(self, codec=self.codec.bind_shapes(shapes))

    def bind_step(self, step: int) -> Codec:
        return replace(self, codec=self.codec.bind_step(step))


def damped(codec: Codec) -> Codec:
    """Return `codec` as a contraction; of the members of `Parts`, only the members that are not contractions are
    damped.
    """
    if isinstance(codec, Parts):
        return replace(codec, codecs=tuple(c if c.contraction or c.lossless else Damped(c) for c in codec.codecs))
    return Damped(codec)
