"""Top-k: the largest elements."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flockstep.arrays import kernels
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.codecs.identity import Identity
from flockstep.codecs.sparse import Sparsifier
from flockstep.codecs.streamed import Indices
from flockstep.errors import ConfigurationError, ProtocolError
from flockstep.expression import searched

SAMPLES = 128
"""How many of a sample's elements should be above the threshold, so that it is about 9 % off."""
LEAST, MOST = 0.8, 1.3
"""Bounds of Lin et al. on how many elements the threshold may let through, relative to how many are wanted."""
TRIES = 4


class Largest(Sparsifier):
    """The largest elements, of all or of every bucket, or nearly the largest, found by a sample."""

    ratio: float
    sampled: bool = False
    bucket: int = 0

    def count(self, size: int) -> int:
        """k, summed over buckets."""
        if not self.bucket:
            return wanted(self.ratio, size)
        return wanted(self.ratio, self.bucket) * (size // self.bucket) + wanted(self.ratio, size % self.bucket)

    def head_bytes(self, size: int) -> int:
        """Of the indices."""
        return -(-self.count(size) * self._bits // 8)

    def choose(self, array: FlatArray, random: np.random.Generator) -> tuple[Bytes, Indices]:
        """The largest, or nearly."""
        k = kernels.of(array)
        if self.bucket:
            indices = k.largest_of_buckets(array, self.bucket, self._counts(len(array)))
            return k.packed_integers(k.within_buckets(indices, self.bucket), self._bits), indices
        indices = select(array, self.count(len(array)), self.sampled, random)
        return k.index_bytes(indices), indices

    def locate(self, data: Bytes, size: int) -> tuple[Indices, int]:
        """From the indices.

        Raises:
            ProtocolError: too few bytes; indices that do not ascend, or reach beyond the array.
        """
        k, count, head = kernels.of(data), self.count(size), self.head_bytes(size)
        if len(data) < head:
            raise ProtocolError(f"{self} needs {head} bytes for the indices of {size} elements, got {len(data)}")
        if self.bucket:
            codes = k.unpacked_integers(data[:head], count, self._bits)
            if len(codes) and int(codes.max()) >= self.bucket:
                raise ProtocolError(f"{self} got index {int(codes.max())} in a bucket of {self.bucket}")
            indices = k.from_buckets(codes, self.bucket, self._counts(size))
        else:
            indices = k.indices_from(data[:head])
        if not k.ascending(indices, size):
            raise ProtocolError(f"{self} got indices that do not ascend or reach beyond {size} elements")
        return indices, head

    def left_out(self, array: FlatArray) -> float:
        """(1 - k/d) ||x||², of every bucket; with a sample 0.8 k for k, or nothing where that is less than one."""
        squares = np.square(array.reshape(-1).astype(np.float64))
        step = self.bucket or max(1, len(squares))
        parts = [squares[start : start + step] for start in range(0, len(squares), step)]
        sure = LEAST if self.sampled else 1.0
        return float(sum(np.sum(part) * (1 - int(sure * wanted(self.ratio, len(part))) / len(part)) for part in parts))

    @property
    def _bits(self) -> int:
        return (self.bucket - 1).bit_length() if self.bucket else 32

    def _counts(self, size: int) -> Any:
        whole, rest = divmod(size, self.bucket)
        counts = [wanted(self.ratio, self.bucket)] * whole + [wanted(self.ratio, rest)] * (rest > 0)
        return np.array(counts, np.int64)


@dataclass(frozen=True)
class TopK(Largest):
    """The `ratio`·d elements of the largest magnitude, at least one; of those that tie, the first.

    `sampled`: above a threshold taken from a sample, again from the same sample until 0.8 to 1.3 times as many elements
    are above it as wanted, of which the largest are sent (as in the code published with Lin et al. 2018); the first of
    the others fill up what is missing, so that the size stays exact. `bucket` > 0: so many of every bucket of elements,
    with indices inside of it in as few whole bits as they need (SparCML, Renggli et al. 2019).
    Without buckets an index takes 32 bits.
    """

    ratio: float = field(default=0.01, metadata=searched(0.001, 0.25, whole=False))
    sampled: bool = False
    bucket: int = 0
    values: Codec = Identity()

    def __post_init__(self) -> None:
        check_ratio("topk", self.ratio)
        if self.bucket < 0 or self.bucket > 1 << 24:
            raise ConfigurationError(f"topk needs a bucket from 0 to 2^24 elements, got {self.bucket}; 0 means none")
        if self.bucket and self.sampled:
            raise ConfigurationError("topk samples only without buckets, got both; leave out one of them")


def select(array: FlatArray, count: int, sampled: bool, random: np.random.Generator) -> Indices:
    """Ascending indices of the `count` largest elements, or of `count` that are nearly.

    A sample's threshold leaves few elements to choose among; where none of its thresholds does, as in an array of
    equal elements, all are chosen among.
    """
    k, size = kernels.of(array), len(array)
    seed = kernels.seed_from(random) if sampled else 0
    stride = count // SAMPLES
    if stride > 1 and size > 4 * count:
        sample = k.sampled(array, seed % stride, stride)
        rank = count * len(sample) / size
        rank += rank / 10 if sampled else 3 * rank**0.5  # so that seldom too few are above
        least, room = int(LEAST * count) + 1 if sampled else count, int((MOST if sampled else 1.6) * count)
        for _ in range(TRIES):
            low = float(sample[max(0, len(sample) - round(rank))])
            found, complete = k.above(array, low, room)
            if complete and len(found) >= count:
                return k.largest(array, count, found)
            if complete and len(found) >= least:
                return k.filled_up(found, count)
            rank *= 0.8 if not complete else 1.25
    return k.largest(array, count)


def check_ratio(name: str, ratio: float) -> None:
    """Raise `ConfigurationError` for a ratio that is none."""
    if not 0 < ratio <= 1:
        raise ConfigurationError(f"{name} needs a ratio above 0 and up to 1, got {ratio}; 0.01 sends one of a hundred")


def wanted(ratio: float, size: int) -> int:
    """That share of `size` elements: at least one, where there is any."""
    return min(size, max(1, round(ratio * size)))
