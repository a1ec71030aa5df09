"""Digest of an array's bits, and whether its elements are finite, in one pass over the memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from flockstep.arrays.kernels.jit import jit

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
            word = part[i]
            products += np.uint64(word) * np.uint64(weights[i])
            special |= np.uint32((word & _INFINITY) == _INFINITY)
        total = total * _FACTOR + products
    return total, special == 0


def digest(bits: Any, before: int = 0) -> tuple[int, bool]:
    """Return the digest of an array's bytes (uint8), and whether all of them are finite if they are those of float32.

    Arrays that differ in one 32-bit word have different digests, other arrays have the same digest only by chance, of
    about 2⁻³². `before`: digest of the arrays before this one.
    """
    if len(bits) % 4 or bits.ctypes.data % 4:
        bits = np.concatenate([bits, np.zeros(-len(bits) % 4, np.uint8)])
    total, finite = _digest(bits.view(np.uint32), _WEIGHTS, np.uint64(before))
    return int(total), bool(finite)
