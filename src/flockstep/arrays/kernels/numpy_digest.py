"""Computes a digest of an array's bits, and whether its elements are finite, in one pass over the memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from flockstep.arrays.kernels.jit import jit
from flockstep.arrays.schema import FlatArray

_LENGTH = 1024
"""Number of weights, which stay in the processor's first cache."""
_WEIGHTS = (np.random.default_rng(_LENGTH).integers(1 << 32, size=_LENGTH) | 1).astype(np.uint32)
"""Odd random numbers: a change of one word changes the sum of the products modulo 2⁶⁴."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""Odd number, by which the sum is multiplied after each `_LENGTH` words, so that the order of words counts."""
_INFINITY = np.uint32(0x7F800000)
"""Bits of the exponent of a float32 that is not finite."""


@jit
def _digest(words: Any, weights: Any, total: Any) -> Any:
    special = np.uint32(0)
    for start in range(0, len(words), len(weights)):
        part = words[start : start + len(weights)]
        products = np.uint64(0)
        for i in range(len(part)):
            products += np.uint64(part[i]) * np.uint64(weights[i])
        total = total * _FACTOR + products
        for i in range(len(part)):  # a loop of its own is faster; the part is in the first cache
            special = max(special, part[i] & _INFINITY)
    return total, special != _INFINITY


def digest(bits: Any, before: int = 0) -> tuple[int, bool]:
    """Return the 64-bit digest of an array's bytes (uint8), and whether all float32 values that the bytes encode are
    finite.

    Arrays that differ in one 32-bit word have different digests; other different arrays have equal digests only by
    chance, with a probability of about 2⁻³². `before`: digest of the arrays before this one.
    """
    if len(bits) % 4 or bits.ctypes.data % 4:
        bits = np.concatenate([bits, np.zeros(-len(bits) % 4, np.uint8)])
    total, finite = _digest(bits.view(np.uint32), _WEIGHTS, np.uint64(before))
    return int(total), bool(finite)


@jit
def _digests(words: Any, bounds: Any, weights: Any, totals: Any) -> Any:
    finite = True
    for index in range(len(totals)):
        totals[index], known = _digest(words[bounds[index, 0] : bounds[index, 1]], weights, np.uint64(0))
        finite &= known
    return finite


def digests(array: FlatArray, bounds: Any) -> tuple[list[int], bool]:
    """Return, for each part of a contiguous float32 array, the digest of its bytes and whether all parts are finite.

    `bounds` (parts, 2) holds the first element of each part and the element after its last.
    """
    totals = np.empty(len(bounds), np.uint64)
    finite = _digests(array.view(np.uint32), bounds, _WEIGHTS, totals)
    return totals.tolist(), bool(finite)
