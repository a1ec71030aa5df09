"""The namespace of an array: its own library's functions, and the way from one library or device to another."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flockstep.arrays.kernels import name_of, numpy_dtype
from flockstep.arrays.schema import FlatArray


def namespace(array: Any) -> Any:
    """The module with the functions for `array`: numpy, or torch. Those of one name do the same in both."""
    return np if isinstance(array, np.ndarray | np.generic) else sys.modules["torch"]


def copied(array: Any) -> FlatArray:
    """A copy of the same shape and dtype, on the same device."""
    copy: FlatArray = array.copy() if isinstance(array, np.ndarray) else array.detach().clone()
    return copy


def cast(array: Any, dtype: str, copy: bool = True) -> FlatArray:
    """A copy with elements of the dtype of that name, on the same device; without `copy` it may share memory."""
    if isinstance(array, np.ndarray | np.generic):
        with np.errstate(invalid="ignore"):  # a NaN stays one
            return array.astype(numpy_dtype(dtype), copy=copy)
    made: FlatArray = array.detach().to(getattr(sys.modules["torch"], dtype), copy=copy)
    return made


def rounded(value: float, array: Any) -> float:
    """A number as the dtype of `array` holds it."""
    if isinstance(array, np.ndarray):
        return float(array.dtype.type(value))
    return float(sys.modules["torch"].tensor(value, dtype=array.dtype))


def on_host(array: Any) -> npt.NDArray[Any]:
    """`array` for numpy; a copy of one that lies on another device."""
    if isinstance(array, np.ndarray):
        return array
    array = array.detach().cpu()
    if name_of(array) == "bfloat16":
        bits: npt.NDArray[Any] = array.view(sys.modules["torch"].int16).numpy()
        return bits.view(numpy_dtype("bfloat16"))
    there: npt.NDArray[Any] = array.numpy()
    return there


def beside(values: Any, array: Any) -> FlatArray:
    """`values` in the library, and on the device, of `array`; as they are where they are there."""
    if isinstance(array, np.ndarray):
        return values if isinstance(values, np.ndarray) else on_host(values)
    return values if is_tensor(values) else tensor(values, array.device)


def tensor(values: npt.NDArray[Any], device: Any = "cpu") -> FlatArray:
    """A torch tensor with those values on that device."""
    torch, wide = sys.modules["torch"], values.dtype.name != "bfloat16"
    moved = torch.tensor(values if wide else values.view(np.int16), device=device)
    there: FlatArray = moved if wide else moved.view(torch.bfloat16)
    return there


def as_tensor(array: Any) -> Any:
    """A tensor that shares a numpy array's memory, a copy where that is read-only; a tensor as it is."""
    if not isinstance(array, np.ndarray):
        return array
    return sys.modules["torch"].from_numpy(array if array.flags.writeable else array.copy())


def is_tensor(value: Any) -> bool:
    """Whether it is a torch tensor; torch need not be there."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def empty(like: Any, *shape: int) -> FlatArray:
    """An array of that shape, whose elements are not set, with the dtype and on the device of `like`."""
    made: FlatArray = np.empty(shape, like.dtype) if isinstance(like, np.ndarray) else like.new_empty(shape)
    return made


def zeros(like: Any, *shape: int, dtype: str = "") -> FlatArray:
    """An array of zeros of that shape, on the device of `like`, with its dtype or the one of that name."""
    if isinstance(like, np.ndarray):
        return np.zeros(shape, numpy_dtype(dtype) if dtype else like.dtype)
    made: FlatArray = like.new_zeros(shape, dtype=getattr(sys.modules["torch"], dtype) if dtype else like.dtype)
    return made


def rows(matrix: Any, indices: Sequence[int], out: Any) -> FlatArray:
    """`out`, with those rows of a matrix copied into it."""
    if isinstance(matrix, np.ndarray):
        return np.take(matrix, indices, 0, out, "clip")
    torch = sys.modules["torch"]
    torch.index_select(matrix, 0, torch.tensor(indices, device=matrix.device), out=out)
    there: FlatArray = out
    return there


def first_not_finite(array: Any) -> int:
    """The index of the first NaN or infinity of a flat array, or -1.

    In numpy a finite sum of squares needs one pass and shows that every element is finite; where the sum is not finite,
    or is slow to come by, elements are looked at one by one. `vdot` does not warn of a sum that overflows.
    """
    if isinstance(array, np.ndarray) and array.dtype.char in "fd" and math.isfinite(np.vdot(array, array)):
        return -1
    wrong = ~namespace(array).isfinite(array)
    return int(wrong.nonzero()[0][0]) if wrong.any() else -1
