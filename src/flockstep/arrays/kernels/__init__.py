"""The primitives that codecs are written over: compiled by numba for numpy arrays, in torch for tensors.

`of(array)` gives the ones for that kind of array; both have the same functions with the same results. Neither numba nor
torch is imported before it is asked for.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from typing import Any

import numpy as np

FLOATS = ("float16", "bfloat16", "float32", "float64")
"""Names of the dtypes that codecs take."""


_loaded = cache(importlib.import_module)


def of(array: Any) -> Any:
    """The module of primitives for `array`, a numpy array or a torch tensor.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(array, (np.ndarray, np.generic)):
        return _loaded("flockstep.arrays.kernels.on_numpy")
    if "torch" in sys.modules and isinstance(array, sys.modules["torch"].Tensor):
        return _loaded("flockstep.arrays.kernels.on_torch")
    raise TypeError(f"kernels are for numpy arrays and torch tensors, got {type(array).__name__}")


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of that name, bfloat16 among them."""
    if name == "bfloat16":
        import ml_dtypes

        kind: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return kind
    return np.dtype(name)


def name_of(array: Any) -> str:
    """The name of an array's dtype, whichever kind of array it is."""
    return str(array.dtype).removeprefix("torch.")


def seed_from(random: np.random.Generator) -> int:
    """A seed of 32 bits for the counter-based numbers of the kernels."""
    return int(random.integers(1 << 32, dtype=np.uint64))
