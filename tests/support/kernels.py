"""The kernels that tests compare with plain references: for numpy arrays, with and without numba, and for tensors."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

import numpy as np
import pytest

PACKAGE = "flockstep.arrays.kernels"


def without_numba() -> Any:
    """The kernels for numpy arrays as they are where numba is missing; imported modules stay as they are."""
    modules = [name for name in sys.modules if name.startswith((f"{PACKAGE}.numpy_", f"{PACKAGE}.jit"))]
    ours = [*modules, f"{PACKAGE}.on_numpy", "numba"]
    before = {name: sys.modules.pop(name) for name in ours if name in sys.modules}
    attributes = vars(sys.modules[PACKAGE]).copy()
    sys.modules["numba"] = None  # type: ignore[assignment]
    try:
        return importlib.import_module(f"{PACKAGE}.on_numpy")
    finally:
        for name in list(sys.modules):
            if name in ours or name.startswith((f"{PACKAGE}.numpy_", f"{PACKAGE}.jit")):
                del sys.modules[name]
        sys.modules.update(before)
        vars(sys.modules[PACKAGE]).update(attributes)


def tensor(array: Any) -> Any:
    """A tensor with the bits of an array, which may be of bfloat16."""
    torch = pytest.importorskip("torch")
    return torch.from_numpy(np.array(array).view(f"i{array.itemsize}")).view(getattr(torch, array.dtype.name))


def plain(array: Any) -> Any:
    """An array or a tensor as an array of numpy; a tensor of bfloat16 as one of float32."""
    if isinstance(array, np.ndarray):
        return array
    return (array.float() if "bfloat" in str(array.dtype) else array).numpy()


ON_NUMPY = importlib.import_module(f"{PACKAGE}.on_numpy")
KINDS = {"numpy": (ON_NUMPY, np.asarray)}
if importlib.util.find_spec("numba") is not None:
    KINDS["plain"] = without_numba(), np.asarray
    assert hasattr(ON_NUMPY.fold, "py_func")
    assert not hasattr(KINDS["plain"][0].fold, "py_func")
if importlib.util.find_spec("torch") is not None:
    KINDS["torch"] = importlib.import_module(f"{PACKAGE}.on_torch"), tensor
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
"""For each kind of array: the kernels, and the function that converts an array of numpy to the kind."""
