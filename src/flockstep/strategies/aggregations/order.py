"""Order statistics of several vectors, element by element."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from flockstep.arrays.namespace import copied, empty, is_tensor, namespace
from flockstep.arrays.schema import FlatArray

BLOCK, TENSOR_BLOCK = 1 << 15, 1 << 22
"""Number of elements of each vector that are sorted at a time: for numpy arrays (BLOCK), and for tensors
(TENSOR_BLOCK). With BLOCK elements, the vectors' blocks fit in a cache.
"""


def by_order(vectors: Sequence[FlatArray], reduce: Callable[[Sequence[Any]], Any]) -> FlatArray:
    """For each k, sort the vectors' elements k in ascending order and apply `reduce` to them; return the array (K,) of
    the results.

    Args:
        vectors: n arrays of shape (K,).
        reduce: function of n arrays of equal shape, the smallest elements first.
    """
    result = empty(vectors[0], len(vectors[0]))
    size = TENSOR_BLOCK if is_tensor(result) else BLOCK
    for start in range(0, len(result), size):
        part = slice(start, start + size)
        result[part] = reduce(ascending([copied(vector[part]) for vector in vectors]))
    return result


def ascending(rows: list[Any]) -> list[Any]:
    """Sort arrays of equal shape in place, element by element, so that every element ascends from the first array to
    the last.
    """
    xp = namespace(rows[0])
    for i, j in comparators(len(rows)):
        smaller = xp.minimum(rows[i], rows[j])
        xp.maximum(rows[i], rows[j], out=rows[j])
        rows[i] = smaller
    return rows


@lru_cache(maxsize=64)
def comparators(n: int) -> tuple[tuple[int, int], ...]:
    """Return the comparators of Batcher's merge exchange sorting network for n inputs (Knuth, volume 3, algorithm
    5.2.2M).
    """
    return tuple(_merge_exchange(n))


def _merge_exchange(n: int) -> Iterator[tuple[int, int]]:
    top = 1 << max(0, (n - 1).bit_length() - 1)
    p = top
    while p:
        q, r, d = top, 0, p
        while True:
            yield from ((i, i + d) for i in range(n - d) if i & p == r)
            if q == p:
                break
            d, q, r = q - p, q // 2, p
        p //= 2
