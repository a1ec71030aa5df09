"""Random-k: elements chosen by a seed that all share, so that no indices need to be sent."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from flockstep.arrays import kernels
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.codecs.identity import Identity
from flockstep.codecs.sparse import Sparsifier
from flockstep.codecs.streamed import Indices
from flockstep.codecs.top import check_ratio, wanted
from flockstep.errors import ProtocolError
from flockstep.expression import searched

SEED_BYTES = 8


@dataclass(frozen=True)
class RandomK(Sparsifier):
    """k = `ratio`·d elements, at least one, each subset as likely (Stich, Cordonnier & Jaggi 2018, definition 2.2).

    In front of the values stands the seed, 8 bytes, which follows from the step of the run and is the same for all who
    take part: sums of encodings are encodings of sums. (With values that are rounded at random everyone has a seed of
    their own.) E||x - C(x)||² = (1 - k/d) ||x||². `scaled`: receivers multiply by d/k, which makes it unbiased, with
    variance d/k - 1, and no contraction. A NaN that is not chosen does not show.
    """

    ratio: float = field(default=0.01, metadata=searched(0.001, 0.25, whole=False))
    scaled: bool = False
    values: Codec = Identity()

    def __post_init__(self) -> None:
        check_ratio("random_k", self.ratio)

    @property
    def unbiased(self) -> bool:
        """Where it is scaled."""
        return self.scaled and self.values.unbiased

    @property
    def contraction(self) -> bool:
        """Where it is not scaled."""
        return not self.scaled and super().contraction

    @property
    def linear(self) -> bool:
        """As of the values, for the elements are the same."""
        return self.values.linear

    @property
    def shares_seed(self) -> bool:
        """All send the same elements, but for values rounded at random: equal draws would round all the same way."""
        return self.values.lossless or not self.values.unbiased

    def variance(self, size: int) -> float | None:
        """d/k - 1, where it is scaled; more with the variance of the values."""
        more = self.values.variance(self.count(size)) if not self.values.lossless else 0.0
        return self.factor(size) * (1 + more) - 1 if self.unbiased and more is not None else None

    def factor(self, size: int) -> float:
        """d/k, where it is scaled."""
        return size / self.count(size) if self.scaled and size else 1.0

    def count(self, size: int) -> int:
        """k."""
        return wanted(self.ratio, size)

    def head_bytes(self, size: int) -> int:
        """Of the seed."""
        return SEED_BYTES

    def choose(self, array: FlatArray, random: np.random.Generator) -> tuple[Bytes, Indices]:
        """Whatever the seed says."""
        k = kernels.of(array)
        seed = kernels.seed_from(random) << 32 | kernels.seed_from(random)
        chosen = k.subset(array, len(array), self.count(len(array)), seed)
        return k.number_bytes(array, seed, SEED_BYTES), chosen

    def locate(self, data: Bytes, size: int) -> tuple[Indices, int]:
        """From the seed.

        Raises:
            ProtocolError: there is none.
        """
        if len(data) < SEED_BYTES:
            raise ProtocolError(f"{self} needs {SEED_BYTES} bytes for its seed, got {len(data)}")
        seed = int.from_bytes(bytes(data[:SEED_BYTES].tolist()), "little")
        return kernels.of(data).subset(data, size, self.count(size), seed), SEED_BYTES

    def terms(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        """The values."""
        if self.is_plain(data, size, dtype):
            return Identity().terms(data, size, dtype)
        return self.values.terms(data[SEED_BYTES:], self.count(size), dtype)

    def left_out(self, array: FlatArray) -> float:
        """||x||², whatever is chosen; scaled (d/k - 1) ||x||², in the mean over seeds."""
        return super().left_out(array) * (self.factor(array.size) - 1 if self.scaled else 1)

    def error_bound(self, array: FlatArray) -> float:
        """That of what is left out; scaled, with the values' error scaled too."""
        return self.left_out(array) + self.factor(array.size) ** 2 * self.values.error_bound(array.reshape(-1))
