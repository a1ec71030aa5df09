"""What quantizing codecs send, element by element, against plain numpy, and the identities that their papers state."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flockstep.codecs.bfloat16 import Bfloat16
from flockstep.codecs.int8 import Int8
from flockstep.codecs.natural import Natural
from flockstep.codecs.one_bit import OneBit
from flockstep.codecs.qsgd import Qsgd
from flockstep.codecs.sign import Sign
from flockstep.codecs.terngrad import TernGrad
from flockstep.feedback.residual import Residual
from flockstep.feedback.sender import bound_codec
from flockstep.testing.codecs import check_codec
from support.codecs import normal, rng, trip, uniforms
from support.matrix import few

pytest.importorskip("numba")


VARIANTS = [
    Int8(block=7),
    Int8(block=64, stochastic=True),
    Int8(block=70000),
    Sign(scaled=False),
    TernGrad(clip=math.inf),
    Qsgd(levels=1, bucket=64),
    Qsgd(levels=16),
    Qsgd(levels=127, bucket=8),
]
"""Settings other than the usual, which `conformance/test_codecs.py` tries."""


@pytest.mark.parametrize("codec", few(VARIANTS, Int8(block=64, stochastic=True), Sign(scaled=False)), ids=str)
def test_every_setting_keeps_what_codecs_promise(codec):
    check_codec(codec)


@pytest.mark.parametrize(
    ("codec", "float32", "float64"),
    [
        (Bfloat16(), 2000, 2000),
        (Int8(block=256), 1000 + 4 * 4, 1000 + 8 * 4),
        (OneBit(), 125 + 8, 125 + 16),
        (Sign(), 125 + 4, 125 + 8),
        (Sign(scaled=False), 125, 125),
        (TernGrad(), 250 + 4, 250 + 8),
        (Qsgd(levels=1), 250 + 8, 250 + 16),
        (Qsgd(levels=4), 500 + 8, 500 + 16),
        (Qsgd(levels=7), 500 + 8, 500 + 16),
        (Qsgd(levels=8), 625 + 8, 625 + 16),
        (Natural(), 1125, 1500),
    ],
    ids=str,
)
def test_wire_bytes_are_the_formula(codec, float32, float64):
    assert codec.wire_bytes(1000, "float32") == codec.encode(normal(1000), rng()).size == float32
    assert codec.wire_bytes(1000, "float64") == codec.encode(normal(1000, 0, np.float64), rng()).size == float64


# int8


@pytest.mark.oracle("codec:int8")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("block", [7, 256, 1024])
def test_int8_is_the_formula_block_by_block(block, dtype):
    x = normal(1000, 3, dtype)
    data, off = Int8(block).encode(x, rng()), 0
    scales = [np.abs(x[i : i + block]).max() for i in range(0, 1000, block)]
    off = len(scales) * x.itemsize
    assert np.array_equal(data[:off].view(dtype), np.array(scales, dtype))
    decoded = trip(Int8(block), x)
    for i, scale in enumerate(scales):
        part = slice(i * block, (i + 1) * block)
        q = np.rint(x[part] / scale * dtype(127))
        assert np.array_equal(data[off:][part].astype(int) - 127, q)
        assert np.array_equal(decoded[part], q.astype(dtype) * (scale / dtype(127)))
        assert np.abs(decoded[part] - x[part]).max() <= scale / 254 * (1 + 1e-4)


def test_int8_at_random_goes_up_where_the_counter_says():
    x = normal(300, 1, np.float64)
    scale = np.abs(x).max()
    m = np.abs(x) / scale * 127
    q = np.floor(m) + (m - np.floor(m) > uniforms(300, 9))
    wanted = np.sign(x) * q * (scale / 127)
    assert np.allclose(trip(Int8(512, stochastic=True), x, 9), wanted, rtol=1e-15)


# 1-bit


@pytest.mark.oracle("codec:one_bit")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_bit_sends_the_means_of_the_sides_of_every_column(dtype):
    x = normal(40 * 6 + 10, 2, dtype)
    x[5] = 0
    matrix, vector = x[:240].reshape(40, 6), x[240:]
    decoded = trip(OneBit().bind_shapes([(40, 6), (10,)]), x)
    for column, seen in [*zip(matrix.T, decoded[:240].reshape(40, 6).T, strict=True), (vector, decoded[240:])]:
        for side in (column >= 0, column < 0):
            mean = column[side].astype(np.float64).mean()
            assert np.allclose(seen[side], mean, rtol=2 * np.finfo(dtype).eps)
            assert np.isclose(seen[side].sum(dtype=np.float64), column[side].sum(dtype=np.float64), rtol=1e-6)
    flat = trip(OneBit(), x)
    assert len(np.unique(flat)) == 2
    assert np.isclose(flat.astype(np.float64).sum(), x.astype(np.float64).sum(), rtol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "codec", [OneBit(), OneBit().bind_shapes([(25, 20)]), OneBit().bind_shapes([(300,), (20, 10)])], ids=str
)
def test_one_bit_with_its_residual_is_the_same_as_in_three_steps(codec, dtype):
    plain, error = np.zeros(500, dtype), np.zeros(500, dtype)
    for step in range(5):
        x = normal(500, step, dtype)
        plain += x
        wanted = codec.encode(plain, rng())
        plain -= codec.decode(wanted, 500, plain.dtype.name)
        assert np.array_equal(codec.encode_residual(x, error, rng()), wanted)
        assert np.array_equal(error, plain)


def test_one_bit_takes_less_than_the_elements_of_thin_matrices():
    codec = OneBit().bind_shapes([(2, 100), (40, 100)])
    assert codec.wire_bytes(4200, "float32") == 800 + (800 + 500)
    x = normal(4200)
    assert np.array_equal(trip(codec, x)[:200], x[:200])


# signSGD


@pytest.mark.oracle("codec:sign")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sign_is_the_mean_magnitude_times_the_sign(dtype):
    x = normal(1000, 4, dtype)
    x[3] = 0
    wanted = np.abs(x.astype(np.float64)).mean() * np.where(x >= 0, 1, -1)
    assert np.allclose(trip(Sign(), x), wanted, rtol=2 * np.finfo(dtype).eps)
    assert np.array_equal(trip(Sign(scaled=False), x), np.where(x >= 0, dtype(1), dtype(-1)))
    layers = trip(Sign().bind_shapes([(300,), (70, 10)]), x)
    assert np.array_equal(layers, np.concatenate([trip(Sign(), x[:300]), trip(Sign(), x[300:])]))


# TernGrad


@pytest.mark.oracle("codec:terngrad")
@pytest.mark.parametrize("clip", [2.5, math.inf])
def test_terngrad_is_bernoulli_of_the_clipped_magnitude(clip):
    x = rng(5).standard_t(3, 1000)
    s = min(np.abs(x).max(), clip * np.sqrt(np.mean(x**2)))
    wanted = s * np.sign(x) * (np.minimum(np.abs(x) / s, 1) > uniforms(1000, 8) + (np.abs(x) >= s) * -1)
    assert np.allclose(trip(TernGrad(clip), x, 8), wanted, rtol=1e-12)


def test_terngrad_has_a_scale_for_every_tensor_and_keeps_constants():
    x = np.concatenate([np.full(50, 1e-3), np.full(70, -5.0)])
    assert np.allclose(trip(TernGrad().bind_shapes([(50,), (70,)]), x), x, rtol=1e-12)
    assert np.count_nonzero(trip(TernGrad(), x)[:50]) < 10


# QSGD


@pytest.mark.oracle("codec:qsgd")
@pytest.mark.parametrize(("levels", "bucket"), [(1, 64), (4, 512), (16, 128), (127, 8)])
def test_qsgd_is_the_formula_bucket_by_bucket(levels, bucket):
    x = normal(1003, 7, np.float64)
    x[::9] = 0
    seen, random = trip(Qsgd(levels, bucket), x, 2), uniforms(1003, 2)
    for i in range(0, 1003, bucket):
        part = slice(i, i + bucket)
        norm = np.linalg.norm(x[part])
        m = np.abs(x[part]) / norm * levels
        xi = np.floor(m) + (m - np.floor(m) > random[part])
        assert np.allclose(seen[part], norm * np.sign(x[part]) * xi / levels, rtol=1e-12)


@pytest.mark.parametrize(("levels", "size"), [(1, 64), (4, 64), (4, 500), (16, 100)])
def test_the_variance_and_the_sparsity_of_qsgd(levels, size):
    codec, x = Qsgd(levels), rng(8).standard_t(3, size)
    draws = np.stack([trip(codec, x, seed) for seed in range(400)])
    errors = np.sum((draws - x) ** 2, 1)
    norm = np.sum(x**2)
    assert codec.variance(size) == min(size / levels**2, math.sqrt(size) / levels)
    assert errors.mean() <= codec.variance(size) * norm + 4 * errors.std() / 20
    counts = np.count_nonzero(draws, 1)
    assert counts.mean() <= levels * (levels + math.sqrt(size)) + 4 * counts.std() / 20


def test_only_a_small_variance_makes_qsgd_a_contraction_and_damping_does_otherwise():
    assert not Qsgd().contraction
    assert Qsgd(levels=16, bucket=64).contraction
    error = None
    for step in range(60):
        x = normal(512, step)
        one = bound_codec(Qsgd(1), Residual(), ((512,),), step)
        _, error = Residual().encode(one, x, error, rng(step))
    assert np.linalg.norm(error) < 60 * np.linalg.norm(normal(512))


# settings


# broken on purpose


class RoundsDown(Int8):
    """Wrong codec: rounds every value down."""

    def encode(self, array, random):
        return super().encode(array - np.abs(array).max(initial=0) / 200, random)


class TooBold(Qsgd):
    """Wrong codec: decodes values a quarter larger than those sent."""

    def _read(self, data, size, dtype):
        step, codes = super()._read(data, size, dtype)
        return step * 1.25, codes


class OneMean(OneBit):
    """Wrong codec: uses the mean of all magnitudes for both signs."""

    def _means(self, floats, sums):
        means = super()._means(floats, sums)
        return np.stack([(means[0] - means[1]) / 2, (means[1] - means[0]) / 2])


class LargestScale(Sign):
    """Wrong codec: scales by the largest magnitude instead of the mean."""

    def uncoded(self, data, size, dtype):
        return 1.5 * super().uncoded(data, size, dtype)


class ClaimsUnbiased(TernGrad):
    """Wrong codec: clips values and declares itself unbiased."""

    @property
    def unbiased(self):
        return True


class AlwaysUp(Natural):
    """Wrong codec: always rounds to the larger power of two."""

    def coded(self, floats, random):
        return super().coded(np.ldexp(np.float32(1), np.frexp(floats)[1]).astype(floats.dtype), random)


class Truncates(Bfloat16):
    """Wrong codec: drops the lower half of the bits."""

    def encode(self, array, random):
        if array.dtype != np.float32:
            return super().encode(array, random)
        return super().encode((array.reshape(-1).view(np.uint32) & 0xFFFF0000).view(np.float32), random)


@pytest.mark.negative_control(
    "codec:bfloat16", "codec:int8", "codec:one_bit", "codec:sign", "codec:terngrad", "codec:qsgd", "codec:natural"
)
@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (RoundsDown(), "RoundsDown on 1 elements of float16: error_bound promises"),
        (TooBold(), "TooBold is declared unbiased"),
        (OneMean(), "OneMean on 7 elements of float16: error_bound promises"),
        (LargestScale(), "LargestScale on 3 elements of float16: error_bound promises"),
        (ClaimsUnbiased(), "ClaimsUnbiased is declared unbiased"),
        (AlwaysUp(), "AlwaysUp on 2 elements of float16: error_bound promises"),
        (Truncates(), "Truncates on 1 elements of float32: error_bound promises"),
    ],
    ids=str,
)
def test_a_broken_quantizer_is_caught(broken, complaint):
    with pytest.raises(AssertionError, match=complaint):
        check_codec(broken)


def test_the_variance_of_natural_is_the_worst_that_is_measured():
    """Between a and 2 a the error is (x - a)(2 a - x), relative to x² the most at 4/3 a: 1/8."""
    codec, x = Natural(), np.full(200_000, 4 / 3, np.float32)
    data = codec.encode(x, np.random.default_rng(0))
    errors = np.square(codec.decode(data, len(x), "float32").astype(np.float64) - x) / np.square(x, dtype=np.float64)
    assert codec.variance(len(x)) == pytest.approx(errors.mean(), rel=0.01)
    assert codec.error_bound(x) == pytest.approx(np.sum(np.square(x, dtype=np.float64)) / 8)
