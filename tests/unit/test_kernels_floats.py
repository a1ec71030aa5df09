"""Formats of 16 bits: numba and torch equal the conversions of numpy and ml_dtypes, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.arrays.kernels import numpy_dtype, on_numpy
from support.kernels import each_kind

FORMATS = ("float16", "bfloat16")
WIDE = ("float32", "float64")
LARGEST = {"float16": 65504.0, "bfloat16": 2.0**128 - 2.0**120}
CODES = np.arange(1 << 16, dtype=np.uint16)


def all_of(dtype):
    """Every number of a format, NaN of all kinds among them."""
    return CODES.view(numpy_dtype(dtype))


def samples(dtype, count=2_000_000):
    """float32: all numbers of the format, what lies halfway between two, the neighbors of both; any bits at all."""
    with np.errstate(all="ignore"):
        numbers = all_of(dtype).astype(np.float32)
        magnitudes = np.sort(numbers[np.isfinite(numbers) & ~np.signbit(numbers)]).astype(np.float64)
        halfway = (magnitudes + np.append(magnitudes[1:], 2 * magnitudes[-1] - magnitudes[-2])) / 2
        points = np.concatenate([numbers, halfway, -halfway]).astype(np.float32)
        beside = [np.nextafter(points, np.float32(way)) for way in (-np.inf, np.inf)]
    random = np.random.default_rng(7).integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)
    small = np.random.default_rng(8).normal(size=count // 8).astype(np.float32) * np.float32(2.0**-18)
    return np.concatenate([points, *beside, random, small])


def between(dtype):
    """float64: samples, and what a rounding to float32 on the way would round twice."""
    with np.errstate(all="ignore"):
        x = samples(dtype, 100_000).astype(np.float64)
        return np.concatenate([x, x * (1 + 2.0**-40), x * (1 - 2.0**-40), x * 2.0**-300, x * 2.0**300])


def reference(x, dtype, largest=np.inf):
    """Of numpy and ml_dtypes, limited; NaN by the rule that the kernels state."""
    kind = numpy_dtype(dtype)
    with np.errstate(all="ignore"):
        limited = np.where(np.isfinite(x), np.clip(x, -largest, largest), x)
        codes = limited.astype(kind if dtype == "float16" else np.float32).astype(kind).view(np.uint16)
    nan, sign = np.isnan(x), np.where(np.signbit(x), 0x8000, 0).astype(np.uint16)
    shift, word = (13, np.uint32) if x.dtype == np.float32 else (42, np.uint64)
    fraction = np.maximum((x.view(word) >> word(shift)) & word(0x3FF), word(1)).astype(np.uint16)
    return np.where(nan, sign | (0x7C00 | fraction if dtype == "float16" else 0x7FC0), codes).astype(np.uint16)


def bits(array):
    """The words of an array of either kind."""
    if not isinstance(array, np.ndarray):
        array = array.view(getattr(pytest.importorskip("torch"), f"int{8 * array.element_size()}"))
    return np.asarray(array).view(f"u{array.itemsize}")


@each_kind
@pytest.mark.parametrize("largest", ["infinite", "finite"])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("make", [samples, between])
def test_narrowing_is_the_plain_conversion(kind, dtype, largest, make):
    k, made = kind
    x, limit = make(dtype), LARGEST[dtype] if largest == "finite" else np.inf
    assert np.array_equal(bits(k.narrowed(made(x), dtype, limit)), reference(x, dtype, limit))


def test_the_rule_for_nan_is_that_of_numpy_and_ml_dtypes():
    # A signalling NaN is left out: where numpy converts by an instruction, that makes it a quiet one.
    fractions = np.arange(1 << 22, dtype=np.uint32)[:: 1 << 5] | np.uint32(0x7FC00000)
    for words in (fractions, fractions | np.uint32(1 << 31)):
        x = words.view(np.float32)
        for dtype in FORMATS:
            assert np.array_equal(x.astype(numpy_dtype(dtype)).view(np.uint16), reference(x, dtype))


@each_kind
@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("dtype", FORMATS)
def test_widening_is_the_plain_conversion(kind, dtype, wide):
    k, made = kind
    x = all_of(dtype)
    with np.errstate(all="ignore"):
        seen, wanted = k.widened(made(x), wide), x.astype(wide)
    nan = np.isnan(wanted)
    assert np.array_equal(bits(seen)[~nan], bits(wanted)[~nan])
    assert np.isnan(np.asarray(seen)[nan]).all()


@each_kind
@pytest.mark.parametrize("scale", [1.0, -1.0, 0.5, 0.1])
@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("dtype", FORMATS)
def test_adding_rounds_the_product_and_the_sum(kind, dtype, wide, scale):
    k, made = kind
    x = all_of(dtype)
    with np.errstate(all="ignore"):
        x = x[np.isfinite(x)]
    out = np.random.default_rng(3).normal(size=len(x)).astype(wide)
    seen = made(out.copy())
    k.add_widened(made(x), seen, scale)
    with np.errstate(all="ignore"):
        assert np.array_equal(bits(seen), bits(out + x.astype(wide) * out.dtype.type(scale)))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 1000])
def test_any_size_at_any_place(dtype, size):
    x = np.random.default_rng(size).normal(size=size).astype(np.float32)
    spread = np.repeat(x, 2)[::2]
    spread.flags.writeable = False
    message = np.concatenate([np.zeros(1, np.uint8), x.view(np.uint8)])
    for view in (spread, message[1:].view(np.float32)):  # neither contiguous nor aligned
        assert np.array_equal(bits(on_numpy.narrowed(view, dtype)), reference(x, dtype))
    narrow = on_numpy.narrowed(x, dtype)
    odd = np.concatenate([np.zeros(1, np.uint8), narrow.view(np.uint8)])[1:].view(narrow.dtype)
    assert np.array_equal(on_numpy.widened(odd, "float32"), narrow.astype(np.float32))
    out = np.zeros(size, np.float32)
    on_numpy.add_widened(odd, out)
    assert np.array_equal(out, narrow.astype(np.float32))


def without_ties(x):
    """Wrong rounding: halves are rounded up, whatever the last bit is."""
    return ((np.abs(x).view(np.uint32) + np.uint32(0xC8001000)) >> np.uint32(13)).astype(np.uint16)


def without_subnormals(x):
    """Wrong rounding: the integer rounding alone, which is right for normal numbers only."""
    m = np.abs(x).view(np.uint32)
    odd = (m >> np.uint32(13)) & np.uint32(1)
    return np.where(m < 0x38800000, 0, (m + np.uint32(0xC8000FFF) + odd) >> np.uint32(13)).astype(np.uint16)


@pytest.mark.parametrize("broken", [without_ties, without_subnormals])
def test_the_samples_notice_a_broken_rounding(broken):
    x = samples("float16", 10_000)
    x = np.abs(x[np.abs(x) < 65504])
    assert not np.array_equal(broken(x), reference(x, "float16"))
    middle = np.float32([1.0, 1 + 2.0**-9, 3.0])
    assert np.array_equal(broken(middle), reference(middle, "float16"))


def test_the_samples_notice_a_bfloat16_cut_off_and_a_number_rounded_twice():
    x = samples("bfloat16", 10_000)
    assert not np.array_equal((x.view(np.uint32) >> np.uint32(16)).astype(np.uint16), reference(x, "bfloat16"))
    y = between("float16")
    with np.errstate(all="ignore"):
        assert not np.array_equal(y.astype(np.float32).astype(np.float16).view(np.uint16), reference(y, "float16"))
