"""Selects the elements of a tensor to send, by magnitude or at random, and puts received elements back in their places.

The functions return the same values as the functions for numpy, but with int64 indices, which torch needs.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from flockstep.arrays.kernels.numpy_selection import halved_sum, round_keys
from flockstep.arrays.kernels.torch_basics import as_floats


def keys_of(array: torch.Tensor) -> torch.Tensor:
    """Return the magnitudes of a flat tensor as integers that sort like the magnitudes: int64 for float64, otherwise
    int32.
    """
    floats = as_floats(array)
    kind = torch.int64 if floats.dtype == torch.float64 else torch.int32
    return floats.view(kind) & torch.iinfo(kind).max


def sampled(array: torch.Tensor, offset: int, stride: int) -> torch.Tensor:
    """Return the magnitudes of every `stride`-th element from index `offset` on, in ascending order."""
    return as_floats(array[offset::stride]).abs().sort().values


def above(array: torch.Tensor, low: float, room: int) -> tuple[torch.Tensor, bool]:
    """Return the ascending indices of all elements with |x| ≥ low, including NaN, and whether there are at most `room`
    such elements.
    """
    indices = torch.nonzero(~(as_floats(array).abs() < low)).reshape(-1)
    return indices, len(indices) <= room


def largest(array: torch.Tensor, count: int, among: torch.Tensor | None = None) -> torch.Tensor:
    """Return the ascending indices of the `count` elements with the largest magnitudes; `among` limits the choice to
    the given indices. Of equal magnitudes the first is chosen.
    """
    keys = keys_of(array if among is None else array[among])
    chosen = _largest(keys[None, :], count).reshape(-1)
    return chosen if among is None else among[chosen]


def largest_of_buckets(array: torch.Tensor, bucket: int, counts: Any) -> torch.Tensor:
    """Return for every bucket b of `bucket` successive elements the ascending indices of its counts[b] largest
    magnitudes, of equal magnitudes the first; only the last count may differ from the others.
    """
    keys = keys_of(array)
    whole = len(keys) // bucket
    parts = []
    if whole:
        chosen = _largest(keys[: whole * bucket].reshape(whole, bucket), int(counts[0]))
        starts = torch.arange(whole, device=keys.device) * bucket
        parts.append((chosen + starts[:, None]).reshape(-1))
    if len(keys) % bucket:
        last = _largest(keys[None, whole * bucket :], int(counts[-1])).reshape(-1)
        parts.append(last + whole * bucket)
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=keys.device)


def _largest(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Return for every row (b, n) the ascending indices (b, count) of its largest keys; of ties, the first."""
    if count == 0:
        return torch.zeros((len(keys), 0), dtype=torch.int64, device=keys.device)
    bound = keys.topk(count, dim=1, sorted=True).values[:, -1:]
    more, same = keys > bound, keys == bound
    wanted = count - more.sum(dim=1, keepdim=True)
    chosen = more | (same & (same.cumsum(dim=1) <= wanted))
    return torch.nonzero(chosen)[:, 1].reshape(len(keys), count)


def subset(like: torch.Tensor, size: int, count: int, seed: int) -> torch.Tensor:
    """Return `count` distinct pseudo-random indices below `size`, in ascending order: the first `count` values of a
    keyed permutation.
    """
    if count >= size:
        return torch.arange(size, device=like.device)
    bits, keys = max(1, (size - 1).bit_length()), round_keys(seed)
    mask, half = (1 << bits) - 1, (bits + 1) // 2
    chosen = torch.arange(count, device=like.device)
    pending = torch.ones(count, dtype=torch.bool, device=like.device)
    while bool(pending.any()):
        x = chosen[pending]
        for r in range(4):
            x = (x + keys[2 * r]) & mask
            x = (x * (keys[2 * r + 1] | 1)) & mask
            x = x ^ (x >> half)
        chosen[pending] = x
        pending = chosen >= size
    return chosen.sort().values


def filled_up(found: torch.Tensor, count: int) -> torch.Tensor:
    """Return `count` ascending indices: all of `found`, and the lowest other indices."""
    others = torch.ones(count, dtype=torch.bool, device=found.device)
    others[found[found < count]] = False
    first = torch.nonzero(others).reshape(-1)[: count - len(found)]
    return torch.cat([found, first]).sort().values


def scattered(indices: torch.Tensor, values: torch.Tensor, size: int) -> torch.Tensor:
    """Return a tensor of shape (size,) that has `values` at `indices` and zeros elsewhere."""
    out = torch.zeros(size, dtype=values.dtype, device=values.device)
    out[indices] = values
    return out


def scatter_add(out: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, scale: float) -> None:
    """Add `scale` times `values` to the elements of `out` at `indices`, in which no index occurs twice."""
    out[indices] += values if scale == 1 else values * scale


def all_indices(like: torch.Tensor, size: int) -> torch.Tensor:
    """Return the indices from 0 to `size` - 1."""
    return torch.arange(size, device=like.device)


def index_bytes(indices: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the indices as uint32, little-endian."""
    return indices.contiguous().view(torch.uint8).reshape(-1, 8)[:, :4].reshape(-1)


def indices_from(data: torch.Tensor) -> torch.Tensor:
    """Return the indices that `index_bytes` has written to `data`."""
    return data.clone().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def number_bytes(like: torch.Tensor, number: int, count: int) -> torch.Tensor:
    """Return an integer as `count` bytes, little-endian."""
    return torch.tensor(list(number.to_bytes(count, "little")), dtype=torch.uint8, device=like.device)


def within_buckets(indices: torch.Tensor, bucket: int) -> torch.Tensor:
    """Return for every index its distance from the start of the bucket that contains it."""
    return indices % bucket


def from_buckets(codes: torch.Tensor, bucket: int, counts: Any) -> torch.Tensor:
    """Return the indices in the whole tensor, given their distances from the start of their buckets; bucket b has
    counts[b] of the indices.
    """
    starts = torch.arange(len(counts), device=codes.device) * bucket
    return codes + torch.repeat_interleave(starts, torch.as_tensor(counts, device=codes.device))


def shifted(indices: torch.Tensor, by: int) -> torch.Tensor:
    """Return the indices with `by` added to each."""
    return indices + by


def full(like: torch.Tensor, count: int, value: float, dtype: str) -> torch.Tensor:
    """Return a tensor (count,) filled with `value`, of the dtype called `dtype`, on the device of `like`."""
    return torch.full((count,), value, dtype=getattr(torch, dtype), device=like.device)


def bins_reached(
    total: torch.Tensor, change: torch.Tensor, width: int, cap: float
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Select from every bin of a flat tensor the elements j with |total_j + change_j| ≥ the bin's largest |total|.

    Zeros are never selected; if no element of a bin reaches the bound, the bin's largest element is selected.

    Returns:
        For each selected element, in order, twice its place in its bin, plus 1 if it is negative; the number of
        elements selected from each bin; and the mean of the bins' largest magnitudes, at most `cap` times the mean
        magnitude of the selected elements (NaN or infinite if an element is).
    """
    bins = -(-len(total) // width)
    g, h = as_floats(total).new_zeros((2, bins * width))
    g[: len(total)] = as_floats(total)
    h[: len(total)] = (g[: len(total)] + as_floats(change)).abs()
    sizes = g.abs().reshape(bins, width)
    most = sizes.amax(dim=1)
    chosen = (h.reshape(bins, width) >= most[:, None]) & (sizes > 0)
    empty = torch.nonzero((most > 0) & ~chosen.any(dim=1)).reshape(-1)
    at_most = (sizes[empty] == most[empty, None]).to(torch.int8).argmax(dim=1)  # of ties, the first
    chosen[empty, at_most] = True
    indices = torch.nonzero(chosen.reshape(-1)).reshape(-1)
    codes = 2 * (indices % width) + (g[indices] < 0)
    scale = halved_sum(most.to(torch.float64)) / bins
    if len(codes) and math.isfinite(scale):
        sums = torch.where(chosen, sizes, 0).to(torch.float64).cumsum(0)[-1]
        scale = min(scale, cap * halved_sum(sums) / len(codes))
    return codes, chosen.sum(dim=1), scale
