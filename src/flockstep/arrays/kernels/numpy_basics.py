"""Conversions between arrays and bytes, for numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flockstep.arrays.kernels import numpy_dtype
from flockstep.arrays.schema import FlatArray

Bytes = npt.NDArray[np.uint8]


def as_floats(array: FlatArray) -> FlatArray:
    """Return a flat contiguous view or copy of an array: float64 stays float64, other dtypes become float32."""
    kind = np.float64 if array.dtype == np.float64 else np.float32
    return np.ascontiguousarray(array.reshape(-1), dtype=kind)


def saturated(array: FlatArray, largest: float) -> FlatArray:
    """Return a copy in which finite values beyond ±largest become ±largest; infinities and NaN do not change."""
    cut: FlatArray = np.where(np.isfinite(array), np.clip(array, -largest, largest), array)
    return cut


def as_bytes(array: FlatArray) -> Bytes:
    """Return the little-endian bytes of a flat array, as a view of its memory if possible."""
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    return little.view(np.uint8)


def from_bytes(data: Bytes, dtype: str) -> FlatArray:
    """Return the array whose little-endian bytes are `data`, as a view of `data` if possible."""
    kind = numpy_dtype(dtype)
    little = np.frombuffer(np.ascontiguousarray(data), kind.newbyteorder("<"))
    return little.astype(kind, copy=False)


def join(*parts: Bytes) -> Bytes:
    """Return one array with all parts, in the given order."""
    return np.concatenate(parts) if len(parts) != 1 else parts[0]
