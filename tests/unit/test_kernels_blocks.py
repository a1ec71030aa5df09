"""Scales of blocks, multiples of them, signs and powers of two: numba and torch equal a plain reference."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.arrays.kernels import on_numpy
from support.kernels import each_kind

FLOATS = ("float32", "float64")


def array_of(size, dtype, seed=0):
    return np.random.default_rng(seed).standard_t(2, size).astype(dtype)


def blocks(x, block):
    return [x[i : i + block] for i in range(0, len(x), block)]


@each_kind
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("size", "block"), [(0, 8), (1, 8), (7, 8), (1000, 64), (1000, 3), (2050, 1 << 62)])
def test_scales(kind, dtype, size, block):
    k, made = kind
    x = array_of(size, dtype)
    top, norms = (np.asarray(k.block_scales(made(x), block, norm)) for norm in (False, True))
    assert top.dtype == norms.dtype == np.dtype(dtype)
    assert np.array_equal(top, np.array([np.abs(part).max() for part in blocks(x, block)], dtype))
    plain = np.array([np.linalg.norm(part.astype(np.float64)) for part in blocks(x, block)])
    assert np.allclose(norms, plain, rtol=2 * np.finfo(dtype).eps, atol=0)


@each_kind
@pytest.mark.parametrize("dtype", FLOATS)
def test_scales_of_extremes(kind, dtype):
    k, made = kind
    most, least = np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal
    x = np.array([most] * 4 + [least] * 4 + [0] * 4 + [1, np.nan, 1, 1] + [-np.inf, 1, 1, 1], dtype)
    top, norms = (np.asarray(k.block_scales(made(x), 4, norm)) for norm in (False, True))
    assert np.array_equal(top, np.array([most, least, 0, np.nan, np.inf], dtype), equal_nan=True)
    assert np.array_equal(norms, np.array([most, 2 * least, 0, np.nan, np.inf], dtype), equal_nan=True)


def plain_codes(k, made, x, scales, block, levels, seed):
    """The codes, computed element by element in the array's own arithmetic."""
    kind = x.dtype.type
    uniforms = np.asarray(k.uniforms(made(np.zeros(0, np.uint8)), len(x), max(seed, 0)))
    codes = []
    for i, value in enumerate(x):
        scale = scales[i // block]
        if not scale:
            codes.append(levels)
            continue
        ratio = kind(kind(value / scale) * kind(levels))
        if seed < 0:
            codes.append(int(np.rint(ratio)) + levels)
            continue
        m = min(abs(ratio), kind(levels))
        q = int(m) + int(m - kind(int(m)) > uniforms[i])
        codes.append(levels + (q if value >= 0 else -q))
    return np.array(codes, np.uint8)


@each_kind
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("seed", [-1, 77])
@pytest.mark.parametrize(
    ("size", "block", "levels", "bits"),
    [
        (0, 8, 4, 4),
        (1, 8, 4, 4),
        (1000, 64, 4, 4),
        (2050, 1 << 62, 1, 2),
        (777, 16, 3, 3),
        (999, 7, 127, 8),
        (99, 8, 60, 7),
    ],
)
def test_multiples_of_scales(kind, dtype, seed, size, block, levels, bits):
    k, made = kind
    x = array_of(size, dtype)
    x[::5] = 0
    scales = np.array([np.abs(part).max() for part in blocks(x, block)], dtype)
    data = k.quantize(made(x), made(scales), block, levels, bits, seed)
    wanted = plain_codes(k, made, x, scales, block, levels, seed)
    assert np.array_equal(np.asarray(data), on_numpy.pack(wanted, bits))
    step = k.steps(made(scales), levels)
    decoded, top = k.dequantize(data, step, block, levels, bits, size)
    steps = np.repeat(np.asarray(step), min(block, max(size, 1)))[:size]
    plain = (wanted.astype(np.int64) - levels).astype(dtype) * steps
    assert np.array_equal(np.asarray(decoded), plain)
    assert top == (wanted.max() if size else 0)
    out = made(np.ones(size, dtype))
    assert k.add_dequantized(data, step, block, levels, bits, out) == top
    assert np.array_equal(np.asarray(out), (1 + plain).astype(dtype))


@each_kind
def test_levels_are_finite_at_the_top_of_the_range(kind):
    k, made = kind
    top = np.finfo(np.float32).max
    step = np.asarray(k.steps(made(np.array([top, 1], np.float32)), 127))
    assert np.isfinite(step * np.float32(127)).all()
    assert step[1] == np.float32(1) / np.float32(127)


@each_kind
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [0, 1, 2, 9, 1024, 70001])
def test_signs_and_sides(kind, dtype, size):
    k, made = kind
    x, more = array_of(size, dtype), array_of(size, dtype, 1)
    for added in (None, more):
        total = x if added is None else x + added
        mine = made(x.copy())
        bits, sums = k.signs(mine, None if added is None else made(added))
        assert np.array_equal(np.asarray(mine), total)
        assert np.array_equal(np.asarray(bits), np.packbits(total < 0, bitorder="little"))
        wide = total.astype(np.float64)
        plain = [wide[wide >= 0].sum(), wide[wide < 0].sum(), np.sum(wide < 0)]
        assert np.allclose(np.asarray(sums), plain, rtol=1e-12)
        values = np.where(total < 0, np.array(-2, dtype), np.array(3, dtype))
        assert np.array_equal(np.asarray(k.from_signs(bits, 3.0, -2.0, size, dtype)), values)
        out = made(np.ones(size, dtype))
        k.add_signs(bits, 3.0, -2.0, out)
        assert np.array_equal(np.asarray(out), 1 + values)
        k.less_sides(mine, 3.0, -2.0)
        assert np.array_equal(np.asarray(mine), total - values)


@each_kind
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(5, 3), (1, 9), (300, 7), (3, 1300)])
def test_sides_of_columns(kind, dtype, shape):
    k, made = kind
    x, more = (array_of(shape[0] * shape[1], dtype, seed).reshape(shape) for seed in (0, 1))
    mine, total = made(x.copy()), x + more
    bits, sums = k.column_signs(mine, made(more))
    assert np.array_equal(np.asarray(mine), total)
    assert np.array_equal(np.asarray(bits), np.packbits(total.reshape(-1) < 0, bitorder="little"))
    above, below = np.where(total >= 0, total, 0), np.where(total < 0, total, 0)
    plain = np.stack([above.sum(0, np.float64), below.sum(0, np.float64), (total < 0).sum(0)])
    assert np.allclose(np.asarray(sums), plain, rtol=1e-12)
    means = k.side_means(sums, shape[0], dtype)
    counts = np.maximum([shape[0] - plain[2], plain[2]], 1)
    assert np.allclose(np.asarray(means), plain[:2] / counts, rtol=np.finfo(dtype).eps)
    decoded = np.where(total < 0, np.asarray(means)[1], np.asarray(means)[0]).reshape(-1)
    assert np.array_equal(np.asarray(k.from_column_signs(bits, means, x.size)), decoded)
    out = made(np.ones(x.size, dtype))
    k.add_column_signs(bits, means, out)
    assert np.array_equal(np.asarray(out), 1 + decoded)


@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_on_other_devices_agree_but_for_the_last_place(dtype):
    torch = pytest.importorskip("torch")
    from flockstep.arrays.kernels import torch_blocks, torch_signs

    x = array_of(1001, dtype)
    x[:7] = 0
    for block, norm in ((64, True), (64, False), (1 << 62, True)):
        seen = torch_blocks.device_scales(torch.from_numpy(x), block, norm).numpy()
        assert np.allclose(seen, on_numpy.block_scales(x, block, norm), rtol=2 * np.finfo(dtype).eps, atol=0)
    odd = np.array([np.finfo(dtype).max] * 4 + [np.finfo(dtype).tiny] * 4 + [np.nan, 1, 1, 1] + [-np.inf], dtype)
    seen = torch_blocks.device_scales(torch.from_numpy(odd), 4, True).numpy()
    assert np.allclose(seen, on_numpy.block_scales(odd, 4, True), rtol=1e-6, equal_nan=True)
    matrix, more = x.reshape(143, 7), array_of(1001, dtype, 1).reshape(143, 7)
    mine = torch.from_numpy(matrix.copy())
    bits, sums = torch_signs.device_signs(mine, torch.from_numpy(more))
    plain = matrix.copy()
    wanted, plain_sums = on_numpy.column_signs(plain, more)
    assert np.array_equal(mine.numpy(), plain)
    assert np.array_equal(bits.numpy(), wanted)
    assert np.allclose(sums.numpy(), plain_sums, rtol=1e-12)
    assert not torch.isfinite(torch_signs.device_signs(torch.tensor([[np.nan]]))[1]).all()


def plain_powers(x, seed):
    """In exact arithmetic: up with the probability of the fraction, by the same 23 random bits."""
    uniforms = (on_numpy.uniforms(np.zeros(0, np.uint8), len(x), seed).astype(np.float64) * 2**23).astype(np.int64)
    result = []
    for value, random in zip(x.astype(np.float64), uniforms, strict=True):
        if value == 0:
            result.append(value)
            continue
        fraction, exponent = np.frexp(abs(value))
        up = 2 * fraction - 1 + random * 2.0**-23 >= 1
        result.append(np.copysign(np.ldexp(1.0, exponent - 1 + up), value))
    return np.array(result)


@each_kind
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [0, 1, 9, 2050])
def test_powers_of_two(kind, dtype, size):
    k, made = kind
    x = array_of(size, dtype) * np.array(10.0, dtype) ** np.random.default_rng(1).integers(-30, 30, size).astype(dtype)
    x[::7] = 0
    low, high, finite = k.to_powers(made(x), 2046 if dtype == "float64" else 254, 5)
    assert finite
    assert len(low) == size
    assert len(high) == -(-size * (4 if dtype == "float64" else 1) // 8)
    decoded, top = k.from_powers(low, high, dtype)
    assert np.array_equal(np.asarray(decoded), plain_powers(x, 5).astype(dtype))
    exponents = np.frexp(np.asarray(decoded).astype(np.float64))[1] - 1
    assert top == (0 if not size or not x.any() else exponents[x != 0].max() + (1023 if dtype == "float64" else 127))
    out = made(np.ones(size, dtype))
    assert k.add_powers(low, high, out, 2.0) == top
    assert np.array_equal(np.asarray(out), 1 + 2 * np.asarray(decoded))


@each_kind
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_powers_of_two_notice_what_is_not_finite(kind, dtype, value):
    k, made = kind
    assert not k.to_powers(made(np.array([1, value, 2], dtype)), 254, 0)[2]
