"""Selects the elements of a numpy array to send, by magnitude or at random, and puts received elements back in their
places.

A key is an element's magnitude as an integer: the bits of the float without its sign, which order like the magnitudes,
with infinity above all numbers and NaN above infinity.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flockstep.arrays.kernels import name_of, numpy_dtype
from flockstep.arrays.kernels.jit import beside, jit
from flockstep.arrays.kernels.numpy_basics import as_floats, from_bytes
from flockstep.arrays.schema import FlatArray

Bytes = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.uint32]
Keys = npt.NDArray[Any]

BLOCK = 16
"""Number of elements that are tested together; most blocks contain no element to send."""
BLOCKS = 1024
"""Number of blocks of `BLOCK` elements that fit in the first-level cache."""


def keys_of(array: FlatArray) -> Keys:
    """Return the magnitudes of a flat array as integers that sort like the magnitudes: int64 for float64, otherwise
    int32.
    """
    floats = as_floats(array)
    kind = np.int64 if floats.dtype == np.float64 else np.int32
    keys: Keys = floats.view(kind)
    return keys & np.iinfo(kind).max


def just_above(like: Any, bound: float) -> float:
    """Return the smallest number greater than `bound`, as a float64 if `like` is float64, otherwise as a float32."""
    if name_of(like) == "float64":
        return float(np.nextafter(bound, np.inf))
    near = np.float32(bound)
    return float(near if float(near) > bound else np.nextafter(near, np.float32(np.inf)))


def sampled(array: FlatArray, offset: int, stride: int) -> FlatArray:
    """Return the magnitudes of every `stride`-th element from index `offset` on, in ascending order."""
    magnitudes = np.abs(as_floats(array[offset::stride]))
    magnitudes.sort()
    return magnitudes


def above(array: FlatArray, low: float, room: int) -> tuple[Indices, bool]:
    """Return the ascending indices of all elements with |x| ≥ low, including NaN, and whether there are at most `room`
    such elements.

    If there are more than `room` such elements, the indices are incomplete.
    """
    floats = as_floats(array)
    indices = np.empty(room + BLOCK, np.uint32)
    count = int(_above(floats, floats.dtype.type(low), indices))
    return indices[:count], count <= room


def largest(array: FlatArray, count: int, among: Indices | None = None) -> Indices:
    """Return the ascending indices of the `count` elements with the largest magnitudes; `among` limits the choice to
    the given indices. Of equal magnitudes the first is chosen.
    """
    keys = keys_of(array if among is None else array[among])
    chosen = np.empty(count, np.uint32)
    _largest(keys, len(keys), np.array([count]), chosen)
    return chosen if among is None else among[chosen]


def largest_of_buckets(array: FlatArray, bucket: int, counts: npt.NDArray[np.int64]) -> Indices:
    """Return for every bucket b of `bucket` successive elements the ascending indices of its counts[b] largest
    magnitudes.
    """
    keys = keys_of(array)
    chosen = np.empty(int(counts.sum()), np.uint32)
    _largest(keys, bucket, counts, chosen)
    return chosen


def subset(like: Any, size: int, count: int, seed: int) -> Indices:
    """Return `count` distinct pseudo-random indices below `size`, in ascending order: the first `count` values of a
    keyed permutation.
    """
    if count >= size:
        return np.arange(size, dtype=np.uint32)
    bits = max(1, (size - 1).bit_length())
    chosen = np.empty(count, np.uint32)
    _subset(np.uint64(size), bits, np.array(round_keys(seed), np.uint64), chosen)
    chosen.sort()
    return chosen


def round_keys(seed: int) -> list[int]:
    """Return the eight 32-bit keys of `subset`'s permutation rounds, derived from a seed of 64 bits (splitmix64)."""
    keys, whole = [], (1 << 64) - 1
    for _ in range(8):
        seed = (seed + 0x9E3779B97F4A7C15) & whole
        mixed = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & whole
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & whole
        keys.append((mixed ^ (mixed >> 31)) >> 32)
    return keys


def filled_up(found: Indices, count: int) -> Indices:
    """Return `count` ascending indices: all of `found`, and the lowest other indices."""
    others = np.ones(count, np.bool_)
    others[found[: np.searchsorted(found, count)]] = False
    first = np.flatnonzero(others)[: count - len(found)].astype(np.uint32)
    return np.sort(np.concatenate([found, first]))


def gathered(array: FlatArray, indices: Indices) -> FlatArray:
    """Return the elements of an array at `indices`."""
    return array[indices]


def scattered(indices: Indices, values: FlatArray, size: int) -> FlatArray:
    """Return an array of shape (size,) that has `values` at `indices` and zeros elsewhere."""
    out = np.zeros(size, values.dtype)
    out[indices] = values
    return out


def put(array: FlatArray, indices: Indices, values: FlatArray | None) -> None:
    """Set the elements of an array at `indices` to `values`, in place, or to zero if `values` is None."""
    array[indices] = 0 if values is None else values


def scatter_add(out: FlatArray, indices: Indices, values: FlatArray, scale: float) -> None:
    """Add `scale` times `values` to the elements of `out` at `indices`, in which no index occurs twice."""
    if scale != 1:
        values = (values * values.dtype.type(scale)).astype(values.dtype, copy=False)
    if out.dtype in (np.float32, np.float64) and values.dtype == out.dtype:
        _scatter_add(
            out, indices.copy(), values.copy()
        )  # copies are aligned and writable, so one compiled version suffices
    else:
        out[indices] += values


def ascending(indices: Indices, size: int) -> bool:
    """Return whether the indices are strictly ascending and below `size`."""
    if not len(indices):
        return True
    return bool(indices[-1] < size) and bool((indices[1:] > indices[:-1]).all())


def all_indices(like: Any, size: int) -> Indices:
    """Return the indices from 0 to `size` - 1."""
    return np.arange(size, dtype=np.uint32)


def index_bytes(indices: Indices) -> Bytes:
    """Return the bytes of the indices as uint32, little-endian."""
    return indices.astype("<u4", copy=False).view(np.uint8)


def indices_from(data: Bytes) -> Indices:
    """Return the indices that `index_bytes` has written to `data`."""
    return from_bytes(data, "uint32")


def number_bytes(like: Any, number: int, count: int) -> Bytes:
    """Return an integer as `count` bytes, little-endian."""
    return np.frombuffer(number.to_bytes(count, "little"), np.uint8)


def within_buckets(indices: Indices, bucket: int) -> Indices:
    """Return for every index its distance from the start of the bucket that contains it."""
    return indices % np.uint32(bucket)


def from_buckets(codes: npt.NDArray[Any], bucket: int, counts: npt.NDArray[np.int64]) -> Indices:
    """Return the indices in the whole array, given their distances from the start of their buckets; bucket b has
    counts[b] of the indices.
    """
    starts = np.repeat(np.arange(len(counts), dtype=np.int64) * bucket, counts)
    return (codes.astype(np.int64) + starts).astype(np.uint32)


def shifted(indices: Indices, by: int) -> Indices:
    """Return the indices with `by` added to each."""
    return indices + np.uint32(by)


def as_codes(places: Indices, negative: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return an integer code for each selected element: twice its index, plus 1 if its value is negative."""
    return 2 * places.astype(np.int64) + negative


def full(like: Any, count: int, value: float, dtype: str) -> FlatArray:
    """Return an array (count,) filled with `value`, of the dtype called `dtype`."""
    return np.full(count, value, numpy_dtype(dtype))


def bins_reached(total: FlatArray, change: FlatArray, width: int, cap: float) -> tuple[Indices, Any, float]:
    """Select from every bin of a flat array the elements j with |total_j + change_j| ≥ the bin's largest |total|.

    Zeros are never selected; if no element of a bin reaches the bound, the bin's largest element is selected.

    Returns:
        The ascending indices, the number of elements selected from each bin, and the mean of the bins' largest
        magnitudes, at most `cap` times the mean magnitude of the selected elements (NaN or infinite if an element is).
    """
    bins = -(-len(total) // width)
    g, h = np.zeros((2, bins * width), np.float64 if total.dtype == np.float64 else np.float32)
    g[: len(total)] = total
    with np.errstate(all="ignore"):
        h[: len(total)] = np.abs(g[: len(total)] + as_floats(change))
        sizes = np.abs(g).reshape(bins, width)
        most = sizes.max(axis=1)
        chosen = (h.reshape(bins, width) >= most[:, None]) & (sizes > 0)
        empty = np.flatnonzero((most > 0) & ~chosen.any(axis=1))
        chosen[empty, sizes[empty].argmax(axis=1)] = True
        counts = chosen.sum(axis=1)
        sent = max(1, int(counts.sum()))
        mean = halved_sum(most.astype(np.float64)) / bins
        scale = min(mean, cap * halved_sum(np.where(chosen, sizes, 0).reshape(-1).astype(np.float64)) / sent)
    return np.flatnonzero(chosen).astype(np.uint32), counts, scale if np.isfinite(mean) else mean


def halved_sum(numbers: Any) -> float:
    """Return the sum in one fixed order, equal for numpy and torch: the two halves of the array are added until one
    element is left.
    """
    rest = 0.0
    while len(numbers) > 1:
        half = len(numbers) // 2
        if len(numbers) % 2:
            rest += float(numbers[-1])
        numbers = numbers[:half] + numbers[half : 2 * half]
    return rest + float(numbers[0])


def _plain_above(x: FlatArray, low: Any, indices: Indices) -> Any:
    found = np.flatnonzero(~(abs(x) < low))
    indices[: len(found)] = found[: len(indices)]
    return len(found)


@beside(_plain_above)
def _above(x: FlatArray, low: Any, indices: Indices) -> Any:
    """Write the indices of the elements that are not below `low`; test many blocks, then search the few with a hit."""
    size, room = len(x), len(indices) - BLOCK
    count = np.uint64(0)
    whole = size // BLOCK
    hits = np.empty(BLOCKS, np.uint32)
    for first in range(0, whole, BLOCKS):
        blocks = min(BLOCKS, whole - first)
        found = np.uint64(0)
        for b in range(np.uint64(first), np.uint64(first + blocks)):
            hit = False
            for i in range(np.uint64(BLOCK)):
                hit |= not (abs(x[b * np.uint64(BLOCK) + i]) < low)
            hits[found] = b
            found += np.uint64(hit)
        for h in range(found):
            if count > np.uint64(room):
                break
            start = np.uint64(hits[h]) * np.uint64(BLOCK)
            for i in range(start, start + np.uint64(BLOCK)):
                indices[count] = i
                count += np.uint64(not (abs(x[i]) < low))
    for i in range(whole * BLOCK, size):
        if not (abs(x[i]) < low) and count <= np.uint64(room):
            indices[count] = i
            count += np.uint64(1)
    return count


def _plain_scatter_add(out: FlatArray, indices: Indices, values: FlatArray) -> None:
    out[indices] += values


@beside(_plain_scatter_add)
def _scatter_add(out: FlatArray, indices: Indices, values: FlatArray) -> None:
    for i in range(len(indices)):
        out[indices[i]] += values[i]


@jit
def _count(keys: Keys, least: Keys) -> Any:
    bound, count = least[0], np.int32(0)
    for i in range(len(keys)):
        count += np.int32(keys[i] >= bound)
    return count


@jit
def _bound(keys: Keys, wanted: int, least: Keys) -> Any:
    """Return a key, and the maximum number to take of the elements equal to it.

    These and all elements above the key are `wanted` elements. The key is found by bisection, without sorting.
    """
    most: Any = np.int64(keys.max())
    low: Any = np.int64(0)
    high: Any = min(most, np.iinfo(np.int64).max - 1) + 1
    count: Any = len(keys)
    while count != wanted and high - low > 1:
        middle = low + (high - low) // 2
        least[0] = middle
        there = _count(keys, least)
        if there >= wanted:
            low, count = middle, there
        else:
            high = middle
    if count == wanted or low == most:
        return low, wanted
    least[0] = low + 1
    return low, wanted - _count(keys, least)


def _plain_largest(keys: Keys, bucket: int, counts: npt.NDArray[np.int64], chosen: Indices) -> None:
    done = 0
    for b, count in enumerate(counts):
        part = keys[b * bucket : (b + 1) * bucket]
        if count == 0:
            continue
        bound = np.partition(part, len(part) - count)[len(part) - count]
        more, same = part > bound, part == bound
        found = np.flatnonzero(more | (same & (np.cumsum(same) <= count - np.count_nonzero(more))))
        chosen[done : done + count] = found + b * bucket
        done += count


@beside(_plain_largest)
def _largest(keys: Keys, bucket: int, counts: npt.NDArray[np.int64], chosen: Indices) -> None:
    done, least = 0, np.empty(1, keys.dtype)
    for b in range(len(counts)):
        if counts[b] == 0:
            continue
        start, stop = b * bucket, min((b + 1) * bucket, len(keys))
        bound, ties = _bound(keys[start:stop], counts[b], least)
        for i in range(start, stop):
            if keys[i] >= bound:
                if keys[i] == bound:
                    if ties == 0:
                        continue
                    ties -= 1
                if done < len(chosen):
                    chosen[done] = i
                    done += 1


def _plain_subset(size: Any, bits: int, keys: npt.NDArray[np.uint64], chosen: Indices) -> None:
    mask, half = np.uint64((1 << bits) - 1), np.uint64((bits + 1) // 2)
    x = np.arange(len(chosen), dtype=np.uint64)
    pending = np.arange(len(chosen))
    while len(pending):
        y = x[pending]
        for r in range(4):
            y = (y + keys[2 * r]) & mask
            y = (y * (keys[2 * r + 1] | np.uint64(1))) & mask
            y ^= y >> half
        x[pending] = y
        pending = pending[y >= size]
    chosen[:] = x


@beside(_plain_subset)
def _subset(size: Any, bits: int, keys: npt.NDArray[np.uint64], chosen: Indices) -> None:
    """Permute by rounds of addition, multiplication by an odd number and xor-shift, each one-to-one on `bits` bits."""
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    half = np.uint64((bits + 1) // 2)
    for i in range(len(chosen)):
        x = np.uint64(i)
        while True:
            for r in range(4):
                x = (x + keys[2 * r]) & mask
                x = (x * (keys[2 * r + 1] | np.uint64(1))) & mask
                x ^= x >> half
            if x < size:
                break
        chosen[i] = x
