"""bfloat16 and natural compression, which keep a float's exponent, against plain numpy."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.arrays import kernels
from flockstep.codecs.bfloat16 import Bfloat16
from flockstep.codecs.natural import Natural
from flockstep.testing.samples import wide
from support.codecs import normal, rng, trip, uniforms

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
