"""The primitives that codecs are written with: compiled by numba for numpy arrays, and in torch for tensors.

`of(array)` returns the module for that kind of array; both modules have the same functions with the same results.
Neither numba nor torch is imported before its module is requested.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from typing import Any

import numpy as np

FLOATS = ("float16", "bfloat16", "float32", "float64")
"""Names of the floating-point dtypes that codecs accept."""


_loaded = cache(importlib.import_module)


def of(array: Any) -> Any:
    """Return the module of primitives for `array`, a numpy array or a torch tensor.

    Raises:
        TypeError: `array` is of another type.
    """
    if isinstance(array, (np.ndarray, np.generic)):
        return _loaded("flockstep.arrays.kernels.on_numpy")
    if "torch" in sys.modules and isinstance(array, sys.modules["torch"].Tensor):
        return _loaded("flockstep.arrays.kernels.on_torch")
    raise TypeError(f"kernels take numpy arrays and torch tensors, got {type(array).__name__}")


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype of the given name, including bfloat16."""
    if name == "bfloat16":
        import ml_dtypes

        kind: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return kind
    return np.dtype(name)


def name_of(array: Any) -> str:
    """Return the name of the dtype of a numpy array or a torch tensor."""
    return str(array.dtype).removeprefix("torch.")


def seed_from(random: np.random.Generator) -> int:
    """Return a seed of 32 bits, drawn from the generator, for the kernels' counter-based random numbers."""
    return int(random.integers(1 << 32, dtype=np.uint64))
