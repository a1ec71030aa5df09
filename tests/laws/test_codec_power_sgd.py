"""PowerSGD's compressor: projection onto a subspace, exact size, and what it leaves out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flockstep.arrays.kernels import numpy_dtype, seed_from
from flockstep.codecs.power import PowerSgdCodec
from flockstep.errors import ConfigurationError, Diverged, ProtocolError
from support.codecs import rng

SHAPES = ((20, 30), (7,), (16, 3, 3), (2, 2), (40, 6))
SIZE = sum(map(math.prod, SHAPES))


def sample(dtype="float64", seed=0):
    return rng(seed).normal(size=SIZE).astype(numpy_dtype(dtype))


def round_trip(codec, array, seed=0):
    return codec.decode(codec.encode(array, rng(seed)), array.size, array.dtype.name)


def oracle(array, rank, seed=0):
    """P Pᵀ M with P from the QR decomposition of M Ω; what is no larger than its factors stays."""
    drawn, decoded, start, index = seed_from(rng(seed)), array.astype(np.float64), 0, 0
    for shape in SHAPES:
        size = math.prod(shape)
        columns = size // shape[0]
        wide = 2 if array.dtype.itemsize == 2 else 1
        if len(shape) > 1 and wide * rank * (shape[0] + columns) < size:
            matrix = decoded[start : start + size].reshape(shape[0], columns)
            p = np.linalg.qr(matrix @ rng((drawn, index)).standard_normal((columns, rank)))[0]
            decoded[start : start + size] = (p @ (p.T @ matrix)).ravel()
            index += 1
        start += size
    return decoded


@pytest.mark.oracle("codec:powersgd")
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 20])
@pytest.mark.parametrize(
    ("dtype", "off"), [("float64", 1e-12), ("float32", 1e-5), ("float16", 5e-3), ("bfloat16", 4e-2)]
)
def test_decodes_to_the_projection(rank, dtype, off):
    array = sample(dtype)
    decoded = round_trip(PowerSgdCodec(rank).bind_shapes(SHAPES), array)
    assert decoded.dtype == array.dtype
    assert np.allclose(decoded.astype(float), oracle(array, rank), rtol=0, atol=off)


@pytest.mark.negative_control("codec:powersgd")
def test_the_oracle_notices_another_subspace_and_another_rank():
    array = sample()
    assert not np.allclose(round_trip(PowerSgdCodec(2).bind_shapes(SHAPES), array, seed=1), oracle(array, 2), atol=0.1)
    assert not np.allclose(round_trip(PowerSgdCodec(1).bind_shapes(SHAPES), array), oracle(array, 2), atol=0.1)


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_bytes_are_exact(rank, dtype):
    """rank (n + m) wide elements for a matrix, where these are fewer bytes than its own."""
    narrow, wide = numpy_dtype(dtype).itemsize, 8 if dtype == "float64" else 4
    expected = 0
    for shape in SHAPES:
        n, m = shape[0], math.prod(shape[1:])
        factors, whole = wide * rank * (n + m), narrow * n * m
        expected += factors if len(shape) > 1 and factors < whole else whole
    codec = PowerSgdCodec(rank).bind_shapes(SHAPES)
    assert codec.wire_bytes(SIZE, dtype) == expected == codec.encode(sample(dtype), rng()).size


def test_columns_that_depend_on_others_do_no_harm():
    """Zero, rank one with rank three, one row only, and huge numbers."""
    codec = PowerSgdCodec(3).bind_shapes([(30, 20)])
    assert not round_trip(codec, np.zeros(600, np.float32)).any()
    for matrix in (np.ones((30, 20)), np.eye(30, 20) * (np.arange(30) == 4)[:, None], 1e30 * np.ones((30, 20))):
        array = matrix.astype(np.float32).ravel()
        assert np.allclose(round_trip(codec, array), array, rtol=1e-5, atol=1e-5 * np.abs(array).max())


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_the_mean_error_of_equal_singular_values_is_the_bound(rank):
    """For an orthogonal matrix every subspace of that rank leaves out exactly 1 - rank/n."""
    matrix = np.linalg.qr(rng().normal(size=(16, 16)))[0].ravel()
    codec = PowerSgdCodec(rank).bind_shapes([(16, 16)])
    for seed in range(5):
        off = np.sum((matrix - round_trip(codec, matrix, seed)) ** 2)
        assert off == pytest.approx(codec.error_bound(matrix)) == pytest.approx(16 - rank)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_names_what_it_cannot_say(value):
    codec, array = PowerSgdCodec(2).bind_shapes(SHAPES), sample("float32")
    array[620] = value
    with pytest.raises(Diverged, match=f"cannot encode {value} at element 620 with powersgd; lower"):
        codec.encode(array, rng())
    array[620] = 0
    array[605] = value  # in a vector, which travels as it is
    assert np.array_equal(round_trip(codec, array)[605], value, equal_nan=True)


def test_refuses_what_makes_no_sense():
    with pytest.raises(ConfigurationError, match="rank must be >= 1, got 0"):
        PowerSgdCodec(0)
    with pytest.raises(ProtocolError, match="powersgd needs"):
        PowerSgdCodec(1).bind_shapes(SHAPES).decode(np.zeros(17, np.uint8), SIZE, "float32")
