"""Arrays, and plain numpy, for the oracles of codecs."""

from __future__ import annotations

import numpy as np

from flockstep.arrays import kernels


def rng(seed=0):
    return np.random.default_rng(seed)


def normal(size, seed=0, dtype=np.float32):
    return rng(seed).normal(size=size).astype(dtype)


def trip(codec, array, seed=0):
    """Encode and decode an array."""
    return codec.decode(codec.encode(array, rng(seed)), array.size, array.dtype.name)


def uniforms(size, seed):
    """What the kernels draw for a generator of that seed."""
    like = np.zeros(0, np.uint8)
    return kernels.of(like).uniforms(like, size, kernels.seed_from(rng(seed))).astype(np.float64)


def top(array, count):
    """The largest elements by definition: sorted by magnitude, then by index."""
    kept = np.lexsort((np.arange(len(array)), -np.abs(array.astype(np.float64))))[:count]
    out = np.zeros_like(array)
    out[kept] = array[kept]
    return out


def squared(array):
    return float(np.sum(np.square(array.astype(np.float64))))
