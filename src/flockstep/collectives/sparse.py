"""Sums of sparse encodings: what travels are the non-zero elements, as long as they are few."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from flockstep.arrays.kernels import numpy_dtype
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.collectives.base import Collective
from flockstep.collectives.costs import Link
from flockstep.collectives.group import Group
from flockstep.collectives.recursive_doubling import RecursiveDoubling
from flockstep.collectives.ring import Ring
from flockstep.collectives.sparse_phases import gathered_parts, summed_by_doubling, summed_parts
from flockstep.collectives.streams import INDEX_BYTES, Stream, threshold

Algorithm = Literal["auto", "ssar_doubling", "ssar_split", "dsar"]
SMALL = 65536
"""Bytes of a stream up to which the number of messages counts for more than their size."""


@dataclass(frozen=True)
class Sparse(Collective):
    """Sparse all-reduce (SparCML: Renggli et al. 2019), of what sparse codecs encode.

    Streams of (index, value) pairs are added; one with more than δ = N s_v / (s_i + s_v) elements goes on as a dense
    array, so that no message is larger than that. Three ways to add:
    `ssar_doubling`: recursive doubling of whole streams, in the order of `recursive_doubling`;
    `ssar_split`: each worker adds up one part of the index range, in order of rank, and the sums are gathered;
    `dsar`: the same, but what is gathered is dense, encoded with `second` (the paper's Q4 is one).
    `auto` takes dsar if the sum is expected to fill in beyond δ, E[nnz] = N (1 - (1-k/N)^P); ssar_doubling for streams
    of at most 64 KiB; otherwise ssar_split. All of it falls back on `dense`: arrays, and encodings that are not sparse;
    with `auto` those of linear codecs too, which are summed without their indices and do not fill in.
    """

    algorithm: Algorithm = "auto"
    dense: Collective = field(default_factory=Ring)
    second: Codec | None = None

    async def all_reduce(self, me: Group, array: FlatArray) -> None:
        """Replace `array` by the sum over all workers, by the dense collective."""
        await self.dense.all_reduce(me, array)

    async def sum_encoded(self, me: Group, data: Bytes, codec: Codec, size: int, dtype: str) -> FlatArray:
        """The sum over all workers of what their encodings stand for, identical in every bit on all of them."""
        if not codec.sparse or (codec.linear and self.algorithm == "auto"):
            return await self.dense.sum_encoded(me, data, codec, size, dtype)
        indices, values = codec.stream(data, size, dtype)
        algorithm = self.algorithm
        if algorithm == "auto":
            algorithm = self.choose(me.workers, size, dtype, await self._elements(me, codec, len(indices), size, dtype))
        if algorithm == "ssar_doubling":
            return (await summed_by_doubling(me, Stream.of(size, values, indices), dtype)).dense()
        own = await summed_parts(me, size, values, indices, dtype)
        return await gathered_parts(me, own, size, dtype, self.second, algorithm == "dsar")

    def choose(self, workers: int, size: int, dtype: str, elements: float) -> Algorithm:
        """The algorithm for streams of so many of `size` elements on each worker."""
        width = numpy_dtype(dtype).itemsize
        if expected_elements(size, elements, workers) > threshold(size, width):
            return "dsar"
        return "ssar_doubling" if elements * (INDEX_BYTES + width) <= SMALL else "ssar_split"

    async def _elements(self, me: Group, codec: Codec, own: int, size: int, dtype: str) -> float:
        """Mean number of elements of a stream, the same on all ranks: from the codec's size if that is always so."""
        if codec.exact_size:
            return min(size, codec.wire_bytes(size, dtype) / (INDEX_BYTES + numpy_dtype(dtype).itemsize))
        count = np.array([own], np.float64)  # whole numbers: exact
        await RecursiveDoubling().all_reduce(me, count)
        return float(count[0]) / me.workers

    def cost(self, workers: int, nbytes: float, link: Link) -> float:
        """Of the dense collective."""
        return self.dense.cost(workers, nbytes, link)

    def sent_elements(self, workers: int, size: int, rank: int) -> int:
        """Of the dense collective."""
        return self.dense.sent_elements(workers, size, rank)

    def rounds(self, workers: int) -> int:
        """Of the dense collective."""
        return self.dense.rounds(workers)


def expected_elements(size: int, elements: float, workers: int) -> float:
    """E[nnz] = N (1 - (1 - k/N)^P) of the sum of P streams of k elements each, on random supports."""
    if elements >= size:
        return float(size)
    return -size * math.expm1(workers * math.log1p(-elements / size))
