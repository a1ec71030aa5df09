"""Top-k: sends the elements of largest magnitude."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flockstep.arrays import kernels
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.codecs.identity import Identity
from flockstep.codecs.sparse import Sparsifier
from flockstep.codecs.streamed import Indices
from flockstep.errors import ConfigurationError, ProtocolError

SAMPLES = 128
"""Number of elements of the sample that should exceed the threshold, for a standard error of about 9 %."""
LEAST, MOST = 0.8, 1.3
"""Bounds on the number of elements that exceed the estimated threshold, as multiples of the wanted number (Lin et al.
2018).
"""
TRIES = 4


class Largest(Sparsifier):
    """Base of codecs that send the largest elements of the whole array or of every bucket, exactly or approximately
    from a sample.
    """

    ratio: float
    sampled: bool = False
    bucket: int = 0

    def count(self, size: int) -> int:
        if not self.bucket:
            return wanted(self.ratio, size)
        return wanted(self.ratio, self.bucket) * (size // self.bucket) + wanted(self.ratio, size % self.bucket)

    def head_bytes(self, size: int) -> int:
        """Return the number of bytes that the indices of an encoding take."""
        return -(-self.count(size) * self._bits // 8)

    def choose(self, array: FlatArray, random: np.random.Generator) -> tuple[Bytes, Indices]:
        """Select the largest elements; with `sampled`, approximately the largest."""
        k = kernels.of(array)
        if self.bucket:
            indices = k.largest_of_buckets(array, self.bucket, self._counts(len(array)))
            return k.packed_integers(k.within_buckets(indices, self.bucket), self._bits), indices
        indices = select(array, self.count(len(array)), self.sampled, random)
        return k.index_bytes(indices), indices

    def locate(self, data: Bytes, size: int) -> tuple[Indices, int]:
        """Return the indices in `data`, and the number of bytes that they take.

        Raises:
            ProtocolError: too few bytes; indices that do not ascend, or exceed the array.
        """
        k, count, head = kernels.of(data), self.count(size), self.head_bytes(size)
        if len(data) < head:
            raise ProtocolError(f"{self} needs {head} bytes for the indices of {size} elements, got {len(data)}")
        if self.bucket:
            codes = k.unpacked_integers(data[:head], count, self._bits)
            if len(codes) and int(codes.max()) >= self.bucket:
                raise ProtocolError(
                    f"{self} got index {int(codes.max())}, but its buckets have only {self.bucket} elements"
                )
            indices = k.from_buckets(codes, self.bucket, self._counts(size))
        else:
            indices = k.indices_from(data[:head])
        if not k.ascending(indices, size):
            raise ProtocolError(f"{self} got indices that are not in ascending order or not below {size}")
        return indices, head

    def left_out(self, array: FlatArray) -> float:
        """Return an upper bound on the squared norm of the elements that are not sent: (1 - k/d) ‖x‖² for every bucket,
        with floor(0.8 k) in place of k if `sampled`.
        """
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
    """Top-k: sends the `ratio`·d elements of largest magnitude, at least one; of equal elements, the first.

    With `sampled`, the threshold is estimated from a sample, and adjusted with the same sample until 0.8 to 1.3 times
    the wanted number of elements exceed the threshold. The largest of these elements are sent (as in the code published
    with Lin et al. 2018); if they are too few, the first of the other elements are added, so that the size stays exact.
    With `bucket` > 0, the largest elements are selected from every bucket of `bucket` elements, with indices within the
    bucket in the fewest whole bits (SparCML, Renggli et al. 2019). Without buckets an index takes 32 bits.
    """

    ratio: float = 0.01
    sampled: bool = False
    bucket: int = 0
    values: Codec = Identity()

    def __post_init__(self) -> None:
        check_ratio("topk", self.ratio)
        if self.bucket < 0 or self.bucket > 1 << 24:
            raise ConfigurationError(
                f"topk needs a bucket from 0 to 2^24 elements, got {self.bucket}; 0 means no buckets"
            )
        if self.bucket and self.sampled:
            raise ConfigurationError(
                "topk can sample only without buckets, got sample and bucket; leave out one of them"
            )


def select(array: FlatArray, count: int, sampled: bool, random: np.random.Generator) -> Indices:
    """Return ascending indices of the `count` largest elements; with `sampled`, of elements that are approximately the
    largest.

    A threshold from a sample reduces the candidates. If no threshold reduces them, as in an array of equal elements,
    all elements are candidates.
    """
    k, size = kernels.of(array), len(array)
    seed = kernels.seed_from(random) if sampled else 0
    stride = count // SAMPLES
    if stride > 1 and size > 4 * count:
        sample = k.sampled(array, seed % stride, stride)
        rank = count * len(sample) / size
        rank += rank / 10 if sampled else 3 * rank**0.5  # so that rarely too few elements are above
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
    """Check that a ratio is in (0, 1].

    Raises:
        ConfigurationError: the ratio lies outside of (0, 1].
    """
    if not 0 < ratio <= 1:
        raise ConfigurationError(f"{name} needs a ratio > 0 and <= 1, got {ratio}; 0.01 sends one element in a hundred")


def wanted(ratio: float, size: int) -> int:
    """Return the number of elements to send: the fraction `ratio` of `size`, and at least one if `size` is positive."""
    return min(size, max(1, round(ratio * size)))
