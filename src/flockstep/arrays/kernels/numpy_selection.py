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
from flockstep.arrays.kernels.numpy_bits import locked
from flockstep.arrays.kernels.numpy_blocks import block_scales, largest_bits
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
    given = array if among is None else array[among]
    chosen = largest_of_buckets(given, len(given), np.array([count]))
    return chosen if among is None else among[chosen]


def largest_of_buckets(array: FlatArray, bucket: int, counts: npt.NDArray[np.int64]) -> Indices:
    """Return for every bucket b of `bucket` successive elements the ascending indices of its counts[b] largest
    magnitudes, of equal magnitudes the first; only the last count may differ from the others.
    """
    chosen = np.empty(int(counts.sum()) + 1, np.uint32)
    _largest(keys_of(array), bucket, counts, chosen)
    return chosen[:-1]


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
    """Return the elements of a flat array at `indices`, all of which lie in the array."""
    if array.dtype not in (np.float32, np.float64):
        return array[indices]
    out = np.empty(len(indices), array.dtype)
    _gather(locked(array), locked(indices), out)
    return out


def scattered(indices: Indices, values: FlatArray, size: int) -> FlatArray:
    """Return an array of shape (size,) that has `values` at `indices` and zeros elsewhere."""
    out = np.zeros(size, values.dtype)
    out[indices] = values
    return out


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
    starts = np.repeat(np.arange(len(counts), dtype=np.uint32) * np.uint32(bucket), counts)
    starts += codes.astype(np.uint32)
    return starts


def shifted(indices: Indices, by: int) -> Indices:
    """Return the indices with `by` added to each."""
    return indices + np.uint32(by)


def full(like: Any, count: int, value: float, dtype: str) -> FlatArray:
    """Return an array (count,) filled with `value`, of the dtype called `dtype`."""
    return np.full(count, value, numpy_dtype(dtype))


def bins_reached(
    total: FlatArray, change: FlatArray, width: int, cap: float
) -> tuple[Indices, npt.NDArray[np.uint32], float]:
    """Select from every bin of a flat array the elements j with |total_j + change_j| ≥ the bin's largest |total|.

    Zeros are never selected; if no element of a bin reaches the bound, the bin's largest element is selected.

    Returns:
        For each selected element, in order, twice its place in its bin, plus 1 if it is negative; the number of
        elements selected from each bin; and the mean of the bins' largest magnitudes, at most `cap` times the mean
        magnitude of the selected elements (NaN or infinite if an element is).
    """
    floats = as_floats(total)
    most = block_scales(floats, width)
    counts, codes, sums = np.zeros(len(most), np.uint32), np.empty(len(floats) + 1, np.uint32), np.zeros(width)
    sent = int(_bins_reached(floats, as_floats(change), most, counts, codes, sums))
    with np.errstate(over="ignore"):
        scale = halved_sum(most.astype(np.float64)) / len(most)
        if sent and np.isfinite(scale):
            scale = min(scale, cap * halved_sum(sums) / sent)
    return codes[:sent], counts, scale


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


def _plain_bins_reached(g: Any, change: Any, most: Any, counts: Any, codes: Indices, sums: Any) -> Any:
    sizes, h = np.zeros((2, len(most), len(sums)), g.dtype)
    sizes.reshape(-1)[: len(g)], h.reshape(-1)[: len(g)] = np.abs(g), np.abs(g + change)
    chosen = (h >= most[:, None]) & (sizes > 0)
    empty = np.flatnonzero((most > 0) & ~chosen.any(axis=1))
    chosen[empty, sizes[empty].argmax(axis=1)] = True
    counts[:] = chosen.sum(axis=1)
    sums[:] = np.add.accumulate(np.where(chosen, sizes, 0).astype(np.float64))[-1]
    found = np.flatnonzero(chosen)
    codes[: len(found)] = 2 * (found % len(sums)) + (g[found] < 0)
    return len(found)


@beside(_plain_bins_reached)
def _bins_reached(g: Any, change: Any, most: Any, counts: Any, codes: Indices, sums: Any) -> Any:
    """Write all codes of a bin, each over the last unless that is selected: `codes` has one element more than `g`."""
    width, done = len(sums), np.uint64(0)
    reached, code = np.empty(width, np.uint8), np.empty(width, np.uint32)
    for b in range(len(most)):
        x, y = g[b * width : (b + 1) * width], change[b * width : (b + 1) * width]
        bound, before = most[b], done
        for j in range(len(x)):
            reached[j] = (abs(x[j] + y[j]) >= bound) & (x[j] != 0)
        for j in range(len(x)):
            code[j] = 2 * j + (x[j] < 0)
        for j in range(len(x)):
            sums[j] += abs(x[j]) if reached[j] else 0
        for j in range(np.uint64(len(x))):
            codes[done] = code[j]
            done += np.uint64(reached[j])
        if done == before and bound > 0:
            j = 0
            while abs(x[j]) < bound:
                j += 1
            codes[done] = code[j]
            sums[j] += bound
            done += np.uint64(1)
        counts[b] = done - before
    return done


def _plain_gather(x: FlatArray, indices: Indices, out: FlatArray) -> None:
    out[:] = x[indices]


@beside(_plain_gather)
def _gather(x: FlatArray, indices: Indices, out: FlatArray) -> None:
    for n in range(len(indices)):
        out[n] = x[indices[n]]


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
                return count
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
    """Return a key, and the number to take of the elements equal to it, or -1 for all.

    These and all elements above the key are `wanted` elements. The key is found by bisection, without sorting.
    """
    most: Any = np.uint64(largest_bits(keys, least.dtype.type(-1)))
    low: Any = np.uint64(0)
    high: Any = most + np.uint64(1)  # unsigned, because the largest key may be the largest int64
    count: Any = len(keys)
    while count != wanted and high - low > np.uint64(1):
        middle = low + (high - low) // np.uint64(2)
        least[0] = middle
        there = _count(keys, least)
        if there >= wanted:
            low, count = middle, there
        else:
            high = middle
    if count == wanted:
        return np.int64(low), -1
    if low < most:
        least[0] = low + np.uint64(1)
        wanted -= _count(keys, least)
    return np.int64(low), wanted


def _plain_largest(keys: Keys, bucket: int, counts: npt.NDArray[np.int64], chosen: Indices) -> None:
    done, whole = 0, len(keys) // max(1, bucket) * bucket
    for start, stop, count in ((0, whole, counts[:1]), (whole, len(keys), counts[-1:])):
        if start == stop or not count[0]:
            continue
        rows = keys[start:stop].reshape(-1, min(bucket, stop - start))
        bound = np.partition(rows, -count[0], axis=1)[:, -count[0], None]
        more, same = rows > bound, rows == bound
        found = np.flatnonzero(more | (same & (np.cumsum(same, axis=1) <= count - more.sum(axis=1, keepdims=True))))
        chosen[done : done + len(found)] = found + start
        done += len(found)


@beside(_plain_largest)
def _largest(keys: Keys, bucket: int, counts: npt.NDArray[np.int64], chosen: Indices) -> None:
    """`chosen` has one element more than are chosen, so that every index can be written without a branch."""
    done, least = np.uint64(0), np.empty(1, keys.dtype)
    for b in range(len(counts)):
        if counts[b] == 0:
            continue
        start, stop = b * bucket, min((b + 1) * bucket, len(keys))
        bound, ties = _bound(keys[start:stop], counts[b], least)
        for first in range(start, stop, BLOCK):
            last, hit = min(first + BLOCK, stop), False
            for i in range(first, last):
                hit |= keys[i] >= bound
            if hit:
                for i in range(np.uint64(first), np.uint64(last)):
                    chosen[done] = i
                    same = keys[i] == bound
                    done += np.uint64((keys[i] > bound) | (same & (ties != 0)))
                    ties -= np.int64(same & (ties > 0))


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
