"""Sample arrays for codecs: all shapes and memory layouts, all float dtypes, ordinary and extreme values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from typing import Any

import numpy as np

from flockstep.arrays.kernels import FLOATS, numpy_dtype
from flockstep.arrays.schema import FlatArray

SIZES = (0, 1, 2, 3, 7, 8, 33, 256, 1000)
SHAPES = ((16, 12), (16,), (3, 4, 5), (), (1,), (40, 2), (7,))
"""Tensor shapes of a small model, for codecs that depend on shapes."""
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
"""Dtype → relative error of rounding to the nearest value."""
SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 2.0**-1074}
"""Dtype → smallest positive number."""
_DECADES = {"float16": (-6, 3), "bfloat16": (-30, 30), "float32": (-30, 30), "float64": (-70, 70)}
"""Dtype → powers of ten between which `wide` draws; squares exceed float32's range, but not float64's."""

assert set(ROUNDING) == set(SMALLEST) == set(_DECADES) == set(FLOATS)


def samples(dtype: str) -> Iterator[FlatArray]:
    """Yield finite arrays of every size, memory layout and kind: one-hot, constant, zero, heavy-tailed."""
    random, kind = np.random.default_rng(0), numpy_dtype(dtype)
    for size in SIZES:
        yield random.normal(size=size).astype(kind)
    yield np.array(-1.5, kind)  # 0-d
    yield (random.standard_t(2, size=256) * 0.01).astype(kind)
    yield np.eye(1, 64, 5).astype(kind)[0]
    yield np.zeros(33, kind)
    yield np.full(65, -0.3, kind)
    yield random.normal(size=66).astype(kind)[::2]
    yield random.normal(size=(9, 13)).astype(kind).T
    yield random.normal(size=40).astype(kind)[::-1]
    locked = random.normal(size=33).astype(kind)
    locked.flags.writeable = False
    yield locked


def wide(dtype: str, size: int = 200) -> FlatArray:
    """Return an array (size,) with magnitudes over the whole range of the dtype, both signs, and a tenth of zeros."""
    random = np.random.default_rng(4)
    low, high = _DECADES[dtype]
    values = 10.0 ** random.uniform(low, high, size) * random.choice([-1, 1], size)
    values[random.random(size) < 0.1] = 0
    spread: FlatArray = values.astype(numpy_dtype(dtype))
    return spread


def tensors(dtype: str) -> Iterator[FlatArray]:
    """Yield flat arrays made of tensors of `SHAPES`: normal values, matrices of rank one, zeros."""
    random, kind = np.random.default_rng(1), numpy_dtype(dtype)
    size = sum(map(math.prod, SHAPES))
    yield random.normal(size=size).astype(kind)
    outer = [reduce(np.multiply.outer, [random.normal(size=n) for n in shape], np.ones(())) for shape in SHAPES]
    yield np.concatenate([product.reshape(-1) for product in outer]).astype(kind)
    yield np.zeros(size, kind)
    yield wide(dtype, size)


def exact(array: Any) -> FlatArray:
    """Return the values of an array as a flat float64 array."""
    values: FlatArray = array.reshape(-1).astype(np.float64)
    return values


def require_close(
    what: str, dtype: str, found: FlatArray, wanted: FlatArray, operands: FlatArray, places: float = 4
) -> None:
    """Check that numbers agree up to `places` roundings in `dtype` of `operands`, the magnitudes they were added from.

    Raises:
        AssertionError: a number is further off; the message begins with `what`.
    """
    found, wanted = exact(found), exact(wanted)
    if equal_bits(found, wanted):
        return
    off, allowed = np.abs(found - wanted), places * ROUNDING[dtype] * operands + min(places, 8) / 2 * SMALLEST[dtype]
    assert (off <= allowed).all(), (
        f"{what} gives {found[np.argmax(off - allowed)]:.9g} instead of {wanted[np.argmax(off - allowed)]:.9g}"
    )


def equal_bits(*arrays: FlatArray) -> bool:
    """Return whether all arrays have equal dtype, shape and bits."""
    return len({(a.dtype, a.shape, a.tobytes()) for a in arrays}) == 1
