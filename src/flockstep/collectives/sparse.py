"""Sparse all-reduce: sums of sparse encodings that stay sparse while few elements are non-zero."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from flockstep.arrays.kernels import numpy_dtype
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.collectives.base import Collective
from flockstep.collectives.costs import LinkModel
from flockstep.collectives.group import Group
from flockstep.collectives.recursive_doubling import RecursiveDoubling
from flockstep.collectives.ring import Ring
from flockstep.collectives.sparse_phases import gathered_parts, summed_by_doubling, summed_parts
from flockstep.collectives.streams import INDEX_BYTES, Stream, threshold

Algorithm = Literal["auto", "ssar_doubling", "ssar_split", "dsar"]
SMALL = 65536
"""Maximum size in bytes of a stream whose exchange time depends more on the number of messages than on the bytes."""


@dataclass(frozen=True)
class Sparse(Collective):
    """Sparse all-reduce (SparCML: Renggli et al. 2019) of the encodings of sparse codecs.

    Streams of (index, value) pairs are added; a stream with more than δ = N s_v / (s_i + s_v) elements becomes a dense
    array, so that no message is larger than the dense array. There are three algorithms:

    * `ssar_doubling`: recursive doubling of whole streams, in the order of `recursive_doubling`; * `ssar_split`: each
    worker sums one part of the index range, in order of rank, and the sums are gathered; * `dsar`: as `ssar_split`, but
    the sums are gathered dense, encoded with the codec `second` (in the paper, for example, Q4).

    `auto` takes dsar if the sum is expected to have more than δ elements, E[nnz] = N (1 - (1-k/N)^P); ssar_doubling for
    streams of at most 64 KiB; otherwise ssar_split. `dense` is used for arrays and for encodings that are not sparse,
    and with `auto` also for encodings of linear codecs, which are summed without indices and stay equally sparse.
    """

    algorithm: Algorithm = "auto"
    dense: Collective = field(default_factory=Ring)
    second: Codec | None = None

    async def all_reduce(self, me: Group, array: FlatArray) -> None:
        await self.dense.all_reduce(me, array)

    async def sum_encoded(self, me: Group, data: Bytes, codec: Codec, size: int, dtype: str) -> FlatArray:
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
        """Return the name of the algorithm for streams that have `elements` non-zero values, on average, in a vector of
        `size` elements.
        """
        width = numpy_dtype(dtype).itemsize
        if expected_elements(size, elements, workers) > threshold(size, width):
            return "dsar"
        return "ssar_doubling" if elements * (INDEX_BYTES + width) <= SMALL else "ssar_split"

    async def _elements(self, me: Group, codec: Codec, own: int, size: int, dtype: str) -> float:
        """Return the mean number of elements of a stream, the same on all ranks; from the codec's size if that is
        exact.
        """
        if codec.exact_size:
            return min(size, codec.wire_bytes(size, dtype) / (INDEX_BYTES + numpy_dtype(dtype).itemsize))
        count = np.array([own], np.float64)  # whole numbers: exact
        await RecursiveDoubling().all_reduce(me, count)
        return float(count[0]) / me.workers

    def cost(self, workers: int, nbytes: float, link: LinkModel) -> float:
        return self.dense.cost(workers, nbytes, link)

    def sent_elements(self, workers: int, size: int, rank: int) -> int:
        return self.dense.sent_elements(workers, size, rank)

    def rounds(self, workers: int) -> int:
        return self.dense.rounds(workers)


def expected_elements(size: int, elements: float, workers: int) -> float:
    """Return the expected number of non-zero elements in the sum of P streams with k elements at random places: E[nnz]
    = N (1 - (1 - k/N)^P).
    """
    if elements >= size:
        return float(size)
    return -size * math.expm1(workers * math.log1p(-elements / size))
