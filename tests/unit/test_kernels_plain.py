"""The kernels of plain numpy, which run where numba is missing, against the compiled ones."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")
PACKAGE = "flockstep.arrays.kernels"
SIZES = (1, 7, 8, 1000, 5003)


def loaded(without_numba: bool) -> ModuleType:
    """The kernels for numpy arrays, freshly imported; the modules that others have imported stay as they are."""
    modules = {
        name: module for name, module in sys.modules.items() if name.startswith((f"{PACKAGE}.numpy_", f"{PACKAGE}.jit"))
    }
    ours = [*modules, f"{PACKAGE}.on_numpy", *(["numba"] if without_numba else [])]
    before = {name: sys.modules.pop(name) for name in ours if name in sys.modules}
    attributes = vars(sys.modules[PACKAGE]).copy()
    if without_numba:
        sys.modules["numba"] = None
    try:
        return importlib.import_module(f"{PACKAGE}.on_numpy")
    finally:
        for name in list(sys.modules):
            if name in ours or name.startswith((f"{PACKAGE}.numpy_", f"{PACKAGE}.jit")):
                del sys.modules[name]
        sys.modules.update(before)
        vars(sys.modules[PACKAGE]).update(attributes)


COMPILED, PLAIN = importlib.import_module(f"{PACKAGE}.on_numpy"), loaded(without_numba=True)
assert hasattr(COMPILED.fold, "py_func")
assert not hasattr(PLAIN.fold, "py_func")


def floats(size: int, dtype: str = "float32", special: bool = False) -> Any:
    random = np.random.default_rng(size)
    drawn = (random.normal(size=size) * 10 ** random.normal(size=size)).astype(dtype)
    if special:
        drawn[::5], drawn[1::7], drawn[2::11] = np.nan, np.inf, -0.0
    return drawn


def bits_of(found: Any) -> list[Any]:
    """All arrays and numbers of a result, arrays by their bytes, so that NaN equals itself."""
    parts = found if isinstance(found, tuple) else (found,)
    return [(one.dtype, one.shape, one.tobytes()) if isinstance(one, np.ndarray) else one for one in parts]


def into(add: Callable[..., Any], like: Any, *given: Any, **more: Any) -> Any:
    """What a function has added to an array, and its result."""
    out = like.copy()
    return out, add(*given, out, **more)


def signs_of(k: ModuleType, x: Any) -> Any:
    bits, sums = k.signs(x)
    return bits, k.from_signs(bits, 1.5, -0.5, len(x), "float32"), into(k.add_signs, x, bits, 1.5, -0.5), sums[2]


def quantized(k: ModuleType, x: Any, scales: Any, block: int, levels: int, bits: int, seed: int) -> Any:
    codes, step = k.quantize(x, scales, block, levels, bits, seed), k.steps(scales, levels)
    return (
        codes,
        *k.dequantize(codes, step, block, levels, bits, len(x)),
        *into(k.add_dequantized, x, codes, step, block, levels, bits),
    )


def powers_of(k: ModuleType, x: Any) -> Any:
    low, high, finite = k.to_powers(x, 200, 3)
    return low, high, finite, *k.from_powers(low, high, x.dtype.name), *into(k.add_powers, x, low, high, scale=0.5)


CASES = {
    "uniforms": lambda k, x: k.uniforms(x, len(x), 7),
    "pack": lambda k, x: tuple(k.pack((x > 0).astype(np.uint8) * ((1 << b) - 1), b) for b in range(1, 9)),
    "unpack": lambda k, x: tuple(k.unpack(np.arange(len(x), dtype=np.uint8), len(x), b) for b in range(1, 9)),
    "block_scales": lambda k, x: (k.block_scales(x, 64), k.block_scales(x, 1 << 20)),
    "quantize to the nearest": lambda k, x: quantized(k, x, k.block_scales(x, 64), 64, 7, 4, -1),
    "quantize at random": lambda k, x: quantized(k, x, COMPILED.block_scales(x, 1 << 20, True), 1 << 20, 127, 8, 5),
    "signs": signs_of,
    "less_sides": lambda k, x: into(lambda out: k.less_sides(out, 2.0, -1.0), x),
    "powers": powers_of,
    "above": lambda k, x: k.above(x, 0.5, len(x)),
    "too many above": lambda k, x: k.above(x, 0.0, 3)[1],
    "largest": lambda k, x: k.largest(x, (len(x) + 1) // 2),
    "largest of equal": lambda k, x: k.largest(np.sign(x), (len(x) + 1) // 3),
    "largest of buckets": lambda k, x: k.largest_of_buckets(x, 64, np.full(-(-len(x) // 64), 1)),
    "subset": lambda k, x: k.subset(x, len(x), (len(x) + 1) // 2, 11),
    "scatter_add": lambda k, x: into(
        lambda out: k.scatter_add(out, np.arange(0, len(x), 3, dtype=np.uint32), x[::3], 2.0), x
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_plain_kernels_give_the_same_bits(name: str) -> None:
    for size in SIZES:
        for dtype in ("float32", "float64"):
            x = floats(size, dtype)
            plain, compiled = CASES[name](PLAIN, x), CASES[name](COMPILED, x)
            assert flat(plain) == flat(compiled), (size, dtype)


def flat(found: Any) -> list[Any]:
    return [two for one in found for two in flat(one)] if isinstance(found, tuple) else bits_of(found)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_plain_conversions_give_the_same_bits(dtype: str) -> None:
    x = np.concatenate([floats(5003, special=True), floats(5003) * np.float32(1e-6), np.float32([65520, -7e4, 1e-45])])
    for largest in (np.inf, 60000.0):
        assert bits_of(PLAIN.narrowed(x, dtype, largest)) == bits_of(COMPILED.narrowed(x, dtype, largest))
    codes = np.arange(1 << 16, dtype=np.uint16).view(COMPILED.numpy_dtype(dtype))
    assert bits_of(PLAIN.widened(codes, "float32")) == bits_of(COMPILED.widened(codes, "float32"))
    finite = codes[np.isfinite(codes.astype(np.float32))]
    start = np.ones(len(finite), np.float64)
    assert flat(into(lambda out: PLAIN.add_widened(finite, out, 0.25), start)) == flat(
        into(lambda out: COMPILED.add_widened(finite, out, 0.25), start)
    )


def test_plain_sums_differ_at_most_in_their_last_digits() -> None:
    """The compiled sums are reordered to use vector registers."""
    x = floats(5003)
    assert PLAIN.block_scales(x, 64, True) == pytest.approx(COMPILED.block_scales(x, 64, True), rel=1e-6)
    assert PLAIN.signs(x)[1] == pytest.approx(COMPILED.signs(x)[1], rel=1e-12)
    matrix = x[:5000].reshape(50, 100)
    plain, compiled = PLAIN.column_signs(matrix), COMPILED.column_signs(matrix)
    assert bits_of(plain[0]) == bits_of(compiled[0])
    assert plain[1] == pytest.approx(compiled[1], rel=1e-12)
    means = COMPILED.side_means(compiled[1], 50, "float32")
    assert bits_of(PLAIN.from_column_signs(plain[0], means, 5000)) == bits_of(
        COMPILED.from_column_signs(plain[0], means, 5000)
    )
