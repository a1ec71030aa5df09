"""Random-k: sends elements that a shared seed selects, without their indices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flockstep.arrays import kernels
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.codecs.identity import Identity
from flockstep.codecs.sparse import Sparsifier
from flockstep.codecs.streamed import Indices
from flockstep.codecs.top import check_ratio, wanted
from flockstep.errors import ProtocolError

SEED_BYTES = 8


@dataclass(frozen=True)
class RandomK(Sparsifier):
    """Random-k (Stich, Cordonnier & Jaggi 2018, definition 2.2): `ratio`·d elements, at least one, drawn uniformly.

    The encoding holds the seed, 8 bytes, and the values. The seed follows from the step of the run and is the same for
    all senders, so that the sum of encodings is the encoding of the sum; if values are rounded at random, every sender
    has its own seed. E||x - C(x)||² = (1 - k/d) ||x||². With `scaled`, receivers multiply by d/k, which makes the codec
    unbiased, with variance d/k - 1, and not a contraction. A NaN is detected only if its element is chosen.
    """

    ratio: float = 0.01
    scaled: bool = False
    values: Codec = Identity()

    def __post_init__(self) -> None:
        check_ratio("random_k", self.ratio)

    @property
    def unbiased(self) -> bool:
        """Whether the codec is `scaled` and the codec of its values is unbiased."""
        return self.scaled and self.values.unbiased

    @property
    def contraction(self) -> bool:
        """Whether the codec is not `scaled`, and the codec of its values is a contraction or unbiased."""
        return not self.scaled and super().contraction

    @property
    def linear(self) -> bool:
        """Whether the codec of the values is linear. Encodings can then be added, because all senders choose the same
        elements.
        """
        return self.values.linear

    @property
    def shares_seed(self) -> bool:
        """Whether all senders draw the same seed; false if values are rounded at random, because all senders would
        round in the same way.
        """
        return self.values.lossless or not self.values.unbiased

    def variance(self, size: int) -> float | None:
        """Return the variance omega: d/k - 1 if `scaled`, increased by the variance of the values' codec; otherwise
        None.
        """
        more = self.values.variance(self.count(size)) if not self.values.lossless else 0.0
        return self.factor(size) * (1 + more) - 1 if self.unbiased and more is not None else None

    def factor(self, size: int) -> float:
        """Return the factor by which receivers multiply the values: d/k if `scaled`, otherwise 1."""
        return size / self.count(size) if self.scaled and size else 1.0

    def count(self, size: int) -> int:
        return wanted(self.ratio, size)

    def head_bytes(self, size: int) -> int:
        """Return the number of bytes that the seed takes."""
        return SEED_BYTES

    def choose(self, array: FlatArray, random: np.random.Generator) -> tuple[Bytes, Indices]:
        """Select the elements that the seed determines."""
        k = kernels.of(array)
        seed = kernels.seed_from(random) << 32 | kernels.seed_from(random)
        chosen = k.subset(array, len(array), self.count(len(array)), seed)
        return k.number_bytes(array, seed, SEED_BYTES), chosen

    def locate(self, data: Bytes, size: int) -> tuple[Indices, int]:
        """Return the indices that the seed in `data` determines, and the length of the seed in bytes.

        Raises:
            ProtocolError: `data` is shorter than a seed.
        """
        if len(data) < SEED_BYTES:
            raise ProtocolError(f"{self} needs {SEED_BYTES} bytes for its seed, got {len(data)}")
        seed = int.from_bytes(bytes(data[:SEED_BYTES].tolist()), "little")
        return kernels.of(data).subset(data, size, self.count(size), seed), SEED_BYTES

    def terms(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        if self.is_plain(data, size, dtype):
            return Identity().terms(data, size, dtype)
        return self.values.terms(data[SEED_BYTES:], self.count(size), dtype)

    def left_out(self, array: FlatArray) -> float:
        """Return the expected squared error of the elements that are not sent: (d/k - 1) ‖x‖² if `scaled`; otherwise
        ‖x‖², an upper bound for every choice.
        """
        return super().left_out(array) * (self.factor(array.size) - 1 if self.scaled else 1)

    def error_bound(self, array: FlatArray) -> float:
        """Return the squared norm of the elements left out plus the error bound of the values, times the square of the
        receivers' factor.
        """
        return self.left_out(array) + self.factor(array.size) ** 2 * self.values.error_bound(array.reshape(-1))
