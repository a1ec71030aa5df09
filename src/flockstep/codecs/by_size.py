"""By size: one codec for large tensors, and another codec for small tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec, Shape
from flockstep.codecs.identity import Identity
from flockstep.codecs.parts import Composed, Parts
from flockstep.codecs.top import TopK
from flockstep.errors import ConfigurationError
from flockstep.expression import SIZED


@dataclass(frozen=True)
class BySize(Composed):
    """By size: the codec `large` for tensors of at least `limit` elements and several dimensions, the codec `small` for
    other tensors.

    Biases, normalization scales and short tensors have few elements, but each of them matters a lot; published
    compressors leave them uncompressed (Lin et al. 2018; Vogels et al. 2019). An array whose tensors are unknown counts
    as one tensor of more than one dimension.
    """

    large: Codec = TopK()
    small: Codec = Identity()
    limit: int = field(default=1024, metadata=SIZED)

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ConfigurationError(f"by_size needs a limit >= 0 elements, got {self.limit}; 1024 is usual")

    def members(self) -> tuple[Codec, ...]:
        return self.large, self.small

    def of(self, size: int) -> Codec:
        """Return the codec that is used for a single tensor of the given size."""
        return self.large if size >= self.limit else self.small

    def wire_bytes(self, size: int, dtype: str) -> int:
        return self.of(size).wire_bytes(size, dtype)

    def variance(self, size: int) -> float | None:
        """Return the larger of the variances omega of the two codecs."""
        found = [0.0 if codec.lossless else codec.variance(size) for codec in (self.large, self.small)]
        known = [omega for omega in found if omega is not None]
        return max(known) if len(known) == len(found) else None

    def encode(self, array: FlatArray, random: np.random.Generator) -> Bytes:
        return self.of(prod(array.shape)).encode(array, random)

    def encode_residual(self, array: FlatArray, error: FlatArray, random: np.random.Generator) -> Bytes:
        return self.of(len(error)).encode_residual(array, error, random)

    def decode(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        return self.of(size).decode(data, size, dtype)

    def add_decoded(self, data: Bytes, out: FlatArray, scale: float = 1.0) -> None:
        self.of(len(out)).add_decoded(data, out, scale)

    def error_bound(self, array: FlatArray) -> float:
        return self.of(prod(array.shape)).error_bound(array)

    def bind_shapes(self, shapes: Sequence[Shape]) -> Codec:
        """Return a codec that encodes each tensor with `large` or `small`; if all tensors use a lossless `small`, that
        codec alone.
        """
        chosen = [self._for(shape) for shape in shapes]
        if chosen and all(codec is self.small for codec in chosen) and self.small.lossless:
            return self.small
        return Parts.of((codec.bind_shapes([shape]) for codec, shape in zip(chosen, shapes, strict=True)), shapes)

    def bind_step(self, step: int) -> Codec:
        return replace(self, large=self.large.bind_step(step), small=self.small.bind_step(step))

    def exact_parts(self, size: int) -> list[slice]:
        return self.of(size).exact_parts(size)

    def sparse_parts(self, size: int) -> list[slice]:
        return self.of(size).sparse_parts(size)

    def _for(self, shape: Shape) -> Codec:
        return self.large if len(shape) > 1 and prod(shape) >= self.limit else self.small
