"""The digest with which a worker finds what its script has changed between two steps."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.arrays.kernels import numpy_digest
from flockstep.arrays.kernels.numpy_digest import digest, digests


def bits(size: int) -> np.ndarray:
    return np.random.default_rng(size).integers(256, size=size, dtype=np.uint8)


@pytest.mark.parametrize("size", [0, 1, 4, 7, 4096, 4097, 3 * 4096 + 10])
def test_it_is_the_weighted_sum_of_the_words_chunk_by_chunk(size: int) -> None:
    words = np.frombuffer(bits(size).tobytes().ljust(-(-size // 4) * 4, b"\0"), np.uint32).tolist()
    weights, total = numpy_digest._WEIGHTS.tolist(), 17
    for start in range(0, len(words), len(weights)):
        part = words[start : start + len(weights)]
        total = total * int(numpy_digest._FACTOR) + sum(w * k for w, k in zip(part, weights, strict=False))
    assert digest(bits(size), 17)[0] == total % 2**64


def test_every_changed_bit_and_every_exchange_of_words_is_found() -> None:
    array = bits(4 * 5000)
    before, words = digest(array)[0], array.view(np.uint32)
    for position in range(0, len(array), 37):
        for bit in range(8):
            array[position] ^= 1 << bit
            assert digest(array)[0] != before
            array[position] ^= 1 << bit
    for first, second in ((0, 1), (3, 1027), (1024, 2048), (4998, 4999)):  # in one chunk, and at one place of two
        words[[first, second]] = words[[second, first]]
        assert digest(array)[0] != before
        words[[first, second]] = words[[second, first]]
    assert digest(array)[0] == before


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_found_anywhere(value: float) -> None:
    array = np.full(3000, np.finfo(np.float32).max, np.float32)
    array[::2] = np.finfo(np.float32).smallest_subnormal
    assert digest(array.view(np.uint8))[1]
    for position in (0, 1023, 1024, 2999):
        array[position], kept = value, array[position]
        assert not digest(array.view(np.uint8))[1]
        array[position] = kept


def test_bits_at_any_address_have_the_same_digest() -> None:
    room = bits(4100)
    for shift in range(1, 4):
        assert digest(room[shift : shift + 4096]) == digest(room[shift : shift + 4096].copy())


@pytest.mark.parametrize("size", [1, 100, 101, 250])
def test_digests_of_blocks_are_the_blocks_own(size: int) -> None:
    array = np.random.default_rng(1).standard_normal(size, np.float32)
    bounds = np.array([(start, min(start + 100, size)) for start in range(0, size, 100)])
    assert digests(array, bounds) == ([digest(array[a:b].view(np.uint8))[0] for a, b in bounds], True)
    array[-1] = np.inf
    assert not digests(array, bounds)[1]
    assert digests(array, bounds[:-1])[1]
