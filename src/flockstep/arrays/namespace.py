"""The namespace of an array (numpy or torch), and conversions between libraries and devices."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flockstep.arrays.kernels import name_of, numpy_dtype
from flockstep.arrays.schema import FlatArray


class DeviceCopies:
    """Counts the bytes of arrays that this process has copied between the host's memory and a device."""

    def __init__(self) -> None:
        self.nbytes = 0


DEVICE_COPIES = DeviceCopies()


def namespace(array: Any) -> Any:
    """Return the module of functions for `array`, numpy or torch; functions of the same name do the same in both."""
    return np if isinstance(array, np.ndarray | np.generic) else sys.modules["torch"]


def copied(array: Any) -> FlatArray:
    """Return a copy of an array, of the same shape and dtype and on the same device."""
    copy: FlatArray = array.copy() if isinstance(array, np.ndarray) else array.detach().clone()
    return copy


def cast(array: Any, dtype: str, copy: bool = True) -> FlatArray:
    """Return an array converted to the dtype of the given name, on the same device; without `copy`, the result may
    share memory with the array.
    """
    if isinstance(array, np.ndarray | np.generic):
        with np.errstate(invalid="ignore"):  # NaN remains NaN
            return array.astype(numpy_dtype(dtype), copy=copy)
    made: FlatArray = array.detach().to(getattr(sys.modules["torch"], dtype), copy=copy)
    return made


def rounded(value: float, array: Any) -> float:
    """Round a number to the precision of the dtype of `array`."""
    if isinstance(array, np.ndarray):
        return float(array.dtype.type(value))
    return float(sys.modules["torch"].tensor(value, dtype=array.dtype))


def to_host(array: Any) -> npt.NDArray[Any]:
    """Return `array` as a numpy array; a copy if it is on another device."""
    if isinstance(array, np.ndarray):
        return array
    given, array = array, array.detach().cpu()
    if array.data_ptr() != given.data_ptr():
        DEVICE_COPIES.nbytes += array.nbytes
    if name_of(array) == "bfloat16":
        bits: npt.NDArray[Any] = array.view(sys.modules["torch"].int16).numpy()
        return bits.view(numpy_dtype("bfloat16"))
    there: npt.NDArray[Any] = array.numpy()
    return there


def to_device_of(values: Any, array: Any) -> FlatArray:
    """Return `values` as an array of the same library and on the same device as `array`; a tensor is returned
    unchanged.
    """
    if isinstance(array, np.ndarray):
        return values if isinstance(values, np.ndarray) else to_host(values)
    if is_tensor(values):
        there: FlatArray = values
        return there
    DEVICE_COPIES.nbytes += values.nbytes  # a flat array in the host's memory is numpy's
    return to_tensor(values, array.device)


def to_tensor(values: npt.NDArray[Any], device: Any = "cpu") -> FlatArray:
    """Return a torch tensor with the given values on the given device."""
    torch, wide = sys.modules["torch"], values.dtype.name != "bfloat16"
    moved = torch.tensor(values if wide else values.view(np.int16), device=device)
    there: FlatArray = moved if wide else moved.view(torch.bfloat16)
    return there


def as_tensor(array: Any) -> Any:
    """Return a tensor that shares the memory of a numpy array, or a copy if the array is read-only; a tensor is
    returned unchanged.
    """
    if not isinstance(array, np.ndarray):
        return array
    return sys.modules["torch"].from_numpy(array if array.flags.writeable else array.copy())


def is_tensor(value: Any) -> bool:
    """Return whether a value is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def empty(like: Any, *shape: int) -> FlatArray:
    """Return an uninitialized array of the given shape, with the dtype and on the device of `like`."""
    made: FlatArray = np.empty(shape, like.dtype) if isinstance(like, np.ndarray) else like.new_empty(shape)
    return made


def zeros(like: Any, *shape: int, dtype: str = "") -> FlatArray:
    """Return an array of zeros of the given shape, on the device of `like`, with the dtype of `like` or the named
    dtype.
    """
    if isinstance(like, np.ndarray):
        return np.zeros(shape, numpy_dtype(dtype) if dtype else like.dtype)
    made: FlatArray = like.new_zeros(shape, dtype=getattr(sys.modules["torch"], dtype) if dtype else like.dtype)
    return made


def joined(*arrays: Any) -> FlatArray:
    """Return one flat array that holds the given flat arrays, one after the other."""
    whole: FlatArray = namespace(arrays[0]).concatenate(arrays)
    return whole


def take_rows(matrix: Any, indices: Sequence[int], out: Any) -> FlatArray:
    """Copy the given rows of a matrix into `out`, and return `out`."""
    if isinstance(matrix, np.ndarray):
        return np.take(matrix, indices, 0, out, "clip")
    torch = sys.modules["torch"]
    torch.index_select(matrix, 0, torch.tensor(indices, device=matrix.device), out=out)
    there: FlatArray = out
    return there


def first_not_finite(array: Any) -> int:
    """Return the index of the first NaN or infinity of a flat array, or -1.

    For numpy, the sum of squares is computed first: if the sum is finite, so is every element. Otherwise, or if the sum
    is slow for the dtype, elements are tested one by one. `vdot` is used because its overflows cause no warning.
    """
    if isinstance(array, np.ndarray) and array.dtype.char in "fd" and math.isfinite(np.vdot(array, array)):
        return -1
    wrong = ~namespace(array).isfinite(array)
    return int(wrong.nonzero()[0][0]) if wrong.any() else -1
