"""bfloat16, natural compression and microscaled floats, which keep a float's exponent, against plain numpy."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.arrays import kernels
from flockstep.codecs.base import Codec
from flockstep.codecs.bfloat16 import Bfloat16
from flockstep.codecs.microscaling import Fp4, Fp8
from flockstep.codecs.natural import Natural
from flockstep.errors import ConfigurationError, ProtocolError
from flockstep.testing.codecs import check_codec
from flockstep.testing.samples import wide
from support.codecs import normal, rng, trip, uniforms
from support.oracles import float8, mxfp4

pytest.importorskip("numba")


# bfloat16


@pytest.mark.oracle("codec:bfloat16")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bfloat16_rounds_to_the_nearest_and_ties_to_even(dtype):
    ties = np.float32([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan, 1e-40])
    x = np.concatenate([wide("float32", 500), ties]).astype(dtype)
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    rounded[np.isnan(x)] = Bfloat16().encode(x[np.isnan(x)], rng()).view(np.uint16)
    rounded[np.isfinite(x) & (rounded & 0x7FFF == 0x7F80)] -= 1  # the largest number, not infinity
    assert np.array_equal(Bfloat16().encode(x, rng()).view("<u2"), rounded)
    assert np.array_equal(trip(Bfloat16(), x)[-3:-1], np.array([-np.inf, np.nan], dtype), equal_nan=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_bfloat16_leaves_two_bytes_as_they_are(dtype):
    x = normal(99).astype(kernels.numpy_dtype(dtype))
    assert trip(Bfloat16(), x).tobytes() == x.tobytes()


# natural compression


@pytest.mark.oracle("codec:natural")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_natural_is_a_neighboring_power_of_two(dtype):
    x = wide(np.dtype(dtype).name, 1000)
    x[np.abs(x) < np.finfo(dtype).tiny] = 0
    seen = trip(Natural(), x, 3).astype(np.float64)
    nonzero = x != 0
    mantissa, exponent = np.frexp(np.abs(x[nonzero]).astype(np.float64))
    up = 2 * mantissa - 1 + np.floor(uniforms(1000, 3)[nonzero] * 2**23) / 2**23 >= 1
    assert np.array_equal(seen[nonzero], np.sign(x[nonzero]) * np.ldexp(1.0, exponent - 1 + up))
    assert not seen[~nonzero].any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_powers_of_two_are_fixed_points_of_natural(dtype):
    low, high = {"float16": (-14, 15), "float64": (-1022, 1023)}.get(dtype, (-126, 127))
    powers = np.ldexp(1.0, np.arange(low, high + 1))
    x = np.concatenate([powers, -powers, [0.0, -0.0]]).astype(kernels.numpy_dtype(dtype))
    assert trip(Natural(), x).tobytes() == x.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_natural_stays_in_the_range(dtype):
    most = np.finfo(dtype).max
    seen = trip(Natural(), np.full(20, most, dtype))
    wanted = most if dtype == "float16" else np.ldexp(1.0, np.frexp(float(most))[1] - 1)
    assert (seen == wanted).all()


# microscaled floats

FORMS = {"fp8": (float8.E4M3, 8), "fp8(format=e5m2)": (float8.E5M2, 15), "fp4": (float8.E2M1, 2)}
"""Codec → format of its elements, and exponent of the format's largest number."""


def spread(dtype):
    """Blocks of all magnitudes, the middles between neighboring numbers of every format, and signed zeros."""
    values = [np.arange(-960, 961) * 2.0**-k for k in (0, 1, 2, 11)]
    return np.concatenate([*values, wide("float32", 500), [0.0, -0.0, -1e-30, 65536, 2.0**-149]]).astype(dtype)


def microscaled(x, form, top):
    """Sections 5.1 and 6.3 of the specification, block by block, with the elements of the oracle float8."""
    decoded = []
    for start in range(0, len(x), 32):
        block = x[start : start + 32].astype(np.float64)
        scale = np.ldexp(1.0, max(-127, np.frexp(np.abs(block).max())[1] - 1 - top))
        decoded.append(float8.decode(float8.encode(block / scale, form, saturate=True), form) * scale)
    return np.concatenate(decoded)


@pytest.mark.oracle("codec:fp8", "codec:fp4")
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("text", FORMS)
def test_microscaled_floats_equal_the_oracle(text, dtype):
    x = spread(kernels.numpy_dtype(dtype))
    expected = microscaled(x, *FORMS[text])
    seen = trip(Codec.parse(text), x).astype(np.float64)
    assert np.array_equal(seen, expected)
    assert np.array_equal(np.signbit(seen), np.signbit(expected))


@pytest.mark.oracle("codec:fp4")
def test_the_bytes_of_fp4_are_those_of_the_specification():
    x = spread(np.float32)
    scales, elements = mxfp4.encode(x)
    data = Fp4().encode(x, rng())
    assert np.array_equal(data[: len(scales)], scales)
    assert np.array_equal(kernels.of(data).unpack(data[len(scales) :], len(x), 4), elements.reshape(-1)[: len(x)])


@pytest.mark.parametrize(("text", "bits"), [("fp8", 8), ("fp8(format=e5m2)", 8), ("fp4", 4)])
def test_a_microscaled_block_has_a_byte_for_its_scale(text, bits):
    assert Codec.parse(text).wire_bytes(1000, "float32") == 1000 * bits // 8 + 32
    assert Codec.parse(text).wire_bytes(3, "float32") == 1 + (3 * bits + 7) // 8


@pytest.mark.parametrize("text", FORMS)
def test_a_multiple_of_a_power_of_two_is_encoded_alike(text):
    x, codec = normal(999), Codec.parse(text)
    assert np.array_equal(trip(codec, x * np.float32(2.0**-40)), trip(codec, x) * np.float32(2.0**-40))


@pytest.mark.parametrize(("codec", "byte", "place"), [(Fp8(), 0x7F, 1), (Fp8("e5m2"), 0xFC, 1), (Fp4(), 255, 0)])
def test_codes_that_are_no_numbers_are_refused(codec, byte, place):
    data = codec.encode(normal(32), rng())
    data[place] = byte
    with pytest.raises(ProtocolError, match="got impossible scales or codes for 32 elements of float32"):
        codec.decode(data, 32, "float32")


def test_an_unknown_format_is_refused():
    with pytest.raises(ConfigurationError, match="format of fp8 must be e4m3 or e5m2, got e3m4; e4m3 is usual"):
        Fp8("e3m4")


class Unscaled(Fp8):
    """Wrong codec: rounds elements without a scale, as a cast does."""

    def coded(self, floats, random):
        data = super().coded(floats, random)
        data[: -(-len(floats) // 32)] = 127
        return data


class TiesUp(Fp4):
    """Wrong codec: rounds ties away from zero."""

    def coded(self, floats, random):
        return super().coded(np.nextafter(floats, np.copysign(np.inf, floats)), random)


@pytest.mark.negative_control("codec:fp8", "codec:fp4")
def test_a_missing_scale_and_other_ties_are_noticed():
    with pytest.raises(AssertionError, match="error_bound promises"):
        check_codec(Unscaled())
    x = spread(np.float32)
    assert not np.array_equal(trip(TiesUp(), x), microscaled(x, *FORMS["fp4"]).astype(np.float32))
