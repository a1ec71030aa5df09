"""Counter-based numbers and packed codes: numba and torch equal a plain reference, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.arrays.kernels import on_numpy
from support.kernels import each_kind

SIZES = (0, 1, 2, 7, 8, 9, 63, 64, 1000, 1025)


def plain_mixed(index, seed):
    """The hash, computed with Python's integers."""
    word = 0xFFFFFFFF
    h = (index * 0x9E3779B1 + seed) & word
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & word
    h = ((h ^ (h >> 15)) * 0x846CA68B) & word
    return h ^ (h >> 16)


def plain_packed(codes, bits):
    """The packed bytes, computed bit by bit."""
    ones = [(int(code) >> bit) & 1 for code in codes for bit in range(bits)]
    return np.packbits(np.array(ones, np.uint8), bitorder="little")


@each_kind
@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1])
def test_uniform_numbers_are_the_hash(kind, seed):
    k, made = kind
    wanted = np.array([plain_mixed(i, seed) >> 8 for i in range(100)], np.float64) * 2.0**-24
    assert np.array_equal(np.asarray(k.uniforms(made(np.zeros(0, np.uint8)), 100, seed)), wanted)


def test_uniform_numbers_are_uniform_and_independent():
    like = np.zeros(0, np.uint8)
    u = on_numpy.uniforms(like, 1 << 18, 12345).astype(np.float64)
    error = 1 / np.sqrt(12 * len(u))
    assert abs(u.mean() - 0.5) < 4 * error
    counts = np.histogram(u, 256, (0, 1))[0]
    chi = np.sum((counts - len(u) / 256) ** 2) / (len(u) / 256)
    assert abs(chi - 255) < 4 * np.sqrt(2 * 255)
    for other in (np.roll(u, 1), np.roll(u, 8), on_numpy.uniforms(like, len(u), 12346)):
        assert abs(np.corrcoef(u, other)[0, 1]) < 4 / np.sqrt(len(u))


@each_kind
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("size", SIZES)
def test_codes_are_really_packed(kind, bits, size):
    k, made = kind
    codes = np.random.default_rng(size).integers(0, 1 << bits, size).astype(np.uint8)
    data = k.pack(made(codes), bits)
    assert len(data) == k.packed_bytes(size, bits) == -(-size * bits // 8)
    assert np.array_equal(np.asarray(data), plain_packed(codes, bits))
    assert np.array_equal(np.asarray(k.unpack(data, size, bits)), codes)


def test_unpacking_read_only_and_strided_bytes():
    codes = np.arange(64, dtype=np.uint8) % 8
    data = on_numpy.pack(codes, 3)
    spread = np.repeat(data, 2)[::2]
    spread.flags.writeable = False
    assert np.array_equal(on_numpy.unpack(spread, 64, 3), codes)
