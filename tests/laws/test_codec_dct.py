"""DeMo's compressor: an orthonormal transform, the largest coefficients, exact size."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flockstep.arrays.kernels import numpy_dtype
from flockstep.codecs.dct import Dct
from flockstep.codecs.tiling import tilings, transformed
from flockstep.errors import ConfigurationError, Diverged, ProtocolError
from support.codecs import rng

SHAPES = ((24, 30), (13,), (16, 3, 3), (2, 2), (40,), ())
SIZE = sum(map(math.prod, SHAPES))


def sample(dtype="float64", seed=0):
    return rng(seed).normal(size=SIZE).astype(numpy_dtype(dtype))


def round_trip(codec, array):
    return codec.decode(codec.encode(array, rng()), array.size, array.dtype.name)


def side(size, chunk):
    return next(d for d in range(chunk, 0, -1) if size % d == 0)


def dct(x):
    """X_f = s_f Σ x_i cos(π (i + ½) f / n), s_0 = √(1/n), others √(2/n), along the last axis: by the definition."""
    n = x.shape[-1]
    sums = [sum(x[..., i] * math.cos(math.pi * (i + 0.5) * f / n) for i in range(n)) for f in range(n)]
    return np.stack([s * math.sqrt((2 if f else 1) / n) for f, s in enumerate(sums)], axis=-1)


def idct(x):
    """x_i = Σ s_f X_f cos(π (i + ½) f / n)."""
    n = x.shape[-1]
    scale = [math.sqrt((2 if f else 1) / n) for f in range(n)]
    sums = [sum(scale[f] * x[..., f] * math.cos(math.pi * (i + 0.5) * f / n) for f in range(n)) for i in range(n)]
    return np.stack(sums, axis=-1)


def oracle(array, k, chunk, keep=np.argsort):
    """Compute the transform chunk by chunk, in plain loops."""
    decoded, start = array.astype(np.float64), 0
    for shape in SHAPES:
        size = math.prod(shape)
        x = decoded[start : start + size].reshape((shape[0], -1) if len(shape) > 1 else (1, -1))
        h, w = side(len(x), chunk) if len(shape) > 1 else 1, side(x.shape[1], chunk)
        kept, bits = min(k, h * w), max(0, math.ceil(math.log2(h * w)))
        sent = size // (h * w) * kept
        if sent * 8 + math.ceil(sent * bits / 8) < size * 8:
            for i in range(0, len(x), h):
                for j in range(0, x.shape[1], w):
                    spectrum = dct(dct(x[i : i + h, j : j + w]).T).T
                    spectrum.flat[keep(np.abs(spectrum).ravel())[: h * w - kept]] = 0
                    x[i : i + h, j : j + w] = idct(idct(spectrum.T).T)
        start += size
    return decoded


@pytest.mark.oracle("codec:dct")
@pytest.mark.parametrize(("k", "chunk"), [(1, 4), (3, 8), (8, 64), (32, 64), (100, 10)])
def test_decodes_to_the_largest_coefficients(k, chunk):
    array = sample()
    assert np.allclose(
        round_trip(Dct(k, chunk).bind_shapes(SHAPES), array), oracle(array, k, chunk), rtol=0, atol=1e-12
    )
    single = array.astype(np.float32)
    assert np.allclose(
        round_trip(Dct(k, chunk).bind_shapes(SHAPES), single), oracle(single, k, chunk), rtol=0, atol=1e-5
    )


@pytest.mark.negative_control("codec:dct")
def test_the_oracle_notices_other_coefficients():
    array = sample()
    smallest = oracle(array, 3, 8, keep=lambda a: np.argsort(-a))
    assert not np.allclose(round_trip(Dct(3, 8).bind_shapes(SHAPES), array), smallest, atol=0.1)
    assert not np.allclose(round_trip(Dct(2, 8).bind_shapes(SHAPES), array), oracle(array, 3, 8), atol=0.01)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(("k", "chunk"), [(1, 4), (3, 8), (32, 64)])
def test_bytes_are_exact(k, chunk, dtype):
    """k indices in whole bits and k values a chunk; the bits of a tensor fill up whole bytes."""
    narrow, wide, expected = numpy_dtype(dtype).itemsize, 8 if dtype == "float64" else 4, 0
    for shape in SHAPES:
        size = math.prod(shape)
        h = side(shape[0], chunk) if len(shape) > 1 else 1
        w = side(size // shape[0] if len(shape) > 1 else size, chunk)
        sent = size // (h * w) * min(k, h * w)
        bits = next(b for b in range(99) if 2**b >= h * w)
        expected += min(sent * wide + -(-sent * bits // 8), size * narrow)
    codec = Dct(k, chunk).bind_shapes(SHAPES)
    assert codec.wire_bytes(SIZE, dtype) == expected == codec.encode(sample(dtype), rng()).size


def test_the_error_is_what_was_not_sent():
    """By Parseval: the squares of all other coefficients, never more than the bound."""
    array = rng().normal(size=64 * 64)
    codec = Dct(k=32).bind_shapes([(64, 64)])
    spectrum = np.sort(np.abs(transformed(array.reshape(1, 64, 64))[0]))
    off = np.sum((array - round_trip(codec, array)) ** 2)
    assert off == pytest.approx(np.sum(spectrum[:-32] ** 2), rel=1e-10)
    assert off < codec.error_bound(array) == pytest.approx((1 - 32 / 4096) * np.sum(array**2))


def test_sides_are_divisors():
    def cut(shape):
        (tiling,) = tilings((shape,), 1, 64, "float32")
        return tiling.height, tiling.width

    assert [cut(s) for s in [(64, 128), (33278, 650), (1000,), (16, 3, 3), (10, 64)]] == [
        (64, 64),
        (14, 50),
        (1, 50),
        (16, 9),
        (10, 64),
    ]
    (prime,) = tilings(((1009,),), 1, 64, "float32")
    assert prime.kept == 0  # chunks of one element say nothing in fewer bytes


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_names_what_it_cannot_say(value):
    array = sample("float32")
    array[100] = value
    with pytest.raises(Diverged, match=f"cannot encode {value} at element 100 with dct; lower"):
        Dct(3, 8).bind_shapes(SHAPES).encode(array, rng())


@pytest.mark.parametrize("place", [0, 1])
def test_refuses_impossible_coefficients(place):
    """Indices 0 and 1 in 6 bits each, then two values."""
    codec, array = Dct(2, 60).bind_shapes([(60,)]), np.zeros(60)
    data = codec.encode(array, rng()).copy()
    assert codec.decode(data, 60, "float64").shape == (60,)
    broken = data.copy()
    broken[:2] = (1 | 1 << 6, 0) if place else (0 | (63 & 3) << 6, 63 >> 2)  # twice the same; beyond the chunk
    with pytest.raises(ProtocolError, match="impossible"):
        codec.decode(broken, 60, "float64")
    data[2:10] = np.frombuffer(np.float64(np.nan).tobytes(), np.uint8)
    with pytest.raises(ProtocolError, match="impossible"):
        codec.decode(data, 60, "float64")


def test_refuses_what_makes_no_sense():
    with pytest.raises(ConfigurationError, match="k must be >= 1, got 0"):
        Dct(k=0)
    with pytest.raises(ConfigurationError, match="chunk must be >= 1, got 0"):
        Dct(chunk=0)
