"""By size: one codec for the large tensors, another for the small ones."""

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
    """`large` for every tensor of at least `limit` elements and more than one dimension, `small` for the others.

    Biases, scales of normalisation and short tensors are few elements that matter much; published compressors leave
    them as they are (Lin et al. 2018; Vogels et al. 2019). Where it is not known which tensors an array holds, it
    counts as one of more than one dimension.
    """

    large: Codec = TopK()
    small: Codec = Identity()
    limit: int = field(default=1024, metadata=SIZED)

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ConfigurationError(f"by_size needs a limit of 0 or more elements, got {self.limit}; 1024 is usual")

    def members(self) -> tuple[Codec, ...]:
        """Both."""
        return self.large, self.small

    def of(self, size: int) -> Codec:
        """The codec for one array of that size."""
        return self.large if size >= self.limit else self.small

    def wire_bytes(self, size: int, dtype: str) -> int:
        """As of the codec for that size."""
        return self.of(size).wire_bytes(size, dtype)

    def variance(self, size: int) -> float | None:
        """The larger."""
        found = [0.0 if codec.lossless else codec.variance(size) for codec in (self.large, self.small)]
        known = [omega for omega in found if omega is not None]
        return max(known) if len(known) == len(found) else None

    def encode(self, array: FlatArray, random: np.random.Generator) -> Bytes:
        """With the codec for that size."""
        return self.of(prod(array.shape)).encode(array, random)

    def encode_residual(self, array: FlatArray, error: FlatArray, random: np.random.Generator) -> Bytes:
        """With the codec for that size."""
        return self.of(len(error)).encode_residual(array, error, random)

    def decode(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        """With the codec for that size.

        Raises:
            ProtocolError: as of that codec.
        """
        return self.of(size).decode(data, size, dtype)

    def add_decoded(self, data: Bytes, out: FlatArray, scale: float = 1.0) -> None:
        """With the codec for that size."""
        self.of(len(out)).add_decoded(data, out, scale)

    def error_bound(self, array: FlatArray) -> float:
        """As of the codec for that size."""
        return self.of(prod(array.shape)).error_bound(array)

    def on(self, shapes: Sequence[Shape]) -> Codec:
        """One codec a tensor, or one where all have the same."""
        chosen = [self._for(shape) for shape in shapes]
        if chosen and all(codec is self.small for codec in chosen) and self.small.lossless:
            return self.small
        return Parts.of((codec.on([shape]) for codec, shape in zip(chosen, shapes, strict=True)), shapes)

    def at(self, step: int) -> Codec:
        """Both at that step."""
        return replace(self, large=self.large.at(step), small=self.small.at(step))

    def exact_parts(self, size: int) -> list[slice]:
        """As of the codec for that size."""
        return self.of(size).exact_parts(size)

    def sparse_parts(self, size: int) -> list[slice]:
        """As of the codec for that size."""
        return self.of(size).sparse_parts(size)

    def _for(self, shape: Shape) -> Codec:
        return self.large if len(shape) > 1 and prod(shape) >= self.limit else self.small
