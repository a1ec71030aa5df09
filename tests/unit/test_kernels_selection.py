"""The kernels that select elements, against plain numpy, for numpy arrays and torch tensors."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.arrays import kernels
from flockstep.arrays.kernels import numpy_selection
from support.kernels import each_kind, plain

ml_dtypes = pytest.importorskip("ml_dtypes")
SIZES = (1, 2, 15, 16, 17, 1000, 16 * 1024 + 5, 40001)
DTYPES = ("float16", "bfloat16", "float32", "float64")


def normal(size, dtype="float32", seed=0):
    return np.random.default_rng(seed).normal(size=size).astype(kernels.numpy_dtype(dtype))


def largest(array, count):
    order = np.lexsort((np.arange(len(array)), -np.abs(array.astype(np.float64))))
    return np.sort(order[:count])


@each_kind
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_above_finds_all_in_order(kind, dtype, size):
    k, made = kind
    array = normal(size, dtype)
    given = made(array)
    found, complete = k.above(given, 1.5, size)
    assert complete
    assert np.array_equal(plain(found), np.flatnonzero(np.abs(array.astype(np.float64)) >= 1.5))


@each_kind
def test_above_says_where_there_are_too_many(kind):
    k, made = kind
    given = made(normal(50000))
    assert k.above(given, 0.0, 100)[1] is False


@each_kind
def test_above_takes_what_is_not_finite(kind):
    k, made = kind
    array = normal(1000)
    array[[3, 500, 999]] = np.nan, np.inf, -np.inf
    given = made(array)
    assert plain(k.above(given, 100.0, 1000)[0]).tolist() == [3, 500, 999]


@each_kind
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_largest_is_a_stable_sort(kind, dtype, size):
    k, made = kind
    array = normal(size, dtype)
    given = made(array)
    for count in {1, size // 2, size} - {0}:
        assert np.array_equal(plain(k.largest(given, count)), largest(array, count))
    some = k.all_indices(given, size)[::3]
    count = (len(some) + 1) // 2
    assert np.array_equal(plain(k.largest(given, count, some)), plain(some)[largest(array[::3], count)])


@each_kind
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, 1e-45, 3e38])
def test_of_equal_elements_the_first_are_largest(kind, value):
    k, made = kind
    given = made(np.full(100, value, np.float32))
    assert plain(k.largest(given, 7)).tolist() == list(range(7))


@each_kind
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nan_of_all_bits_is_the_largest_and_breaks_nothing(kind, dtype):
    k, made = kind
    bits = np.int32(0x7FFFFFFF) if dtype == "float32" else np.int64(0x7FFFFFFFFFFFFFFF)
    given = made(np.full(50, bits).view(dtype))
    assert plain(k.largest(given, 3)).tolist() == [0, 1, 2]
    chosen = np.full(60, 77, np.uint32)  # the kernel gets room for one index more than it selects
    numpy_selection._largest(numpy_selection.keys_of(plain(given)), 50, np.array([3]), chosen)
    assert chosen[4:].tolist() == [77] * 56


@each_kind
@pytest.mark.parametrize("size", [1, 511, 512, 513, 5000])
def test_largest_of_buckets(kind, size):
    k, made = kind
    array = normal(size)
    given = made(array)
    counts = np.array([min(16, len(array[s : s + 512])) for s in range(0, size, 512)], np.int64)
    wanted = [s + largest(array[s : s + 512], n) for s, n in zip(range(0, size, 512), counts, strict=True)]
    found = k.largest_of_buckets(given, 512, counts)
    assert np.array_equal(plain(found), np.concatenate(wanted))
    assert np.array_equal(plain(k.from_buckets(k.within_buckets(found, 512), 512, counts)), plain(found))


@each_kind
def test_just_above_is_the_next_number(kind):
    k, made = kind
    for bound in (0.1, 1.0, 0.0):
        for dtype in (np.float32, np.float64):
            given = made(np.zeros(1, dtype))
            low = k.just_above(given, bound)
            assert low > bound
            assert float(np.nextafter(dtype(low), dtype(-np.inf))) <= bound


@each_kind
def test_a_subset_is_a_subset_and_the_same_everywhere(kind):
    k, made = kind
    zero = np.zeros(1, np.float32)
    for size in (1, 2, 3, 7, 64, 1000, 100_003):
        for count in {1, size // 3, size - 1, size} - {0}:
            found = plain(k.subset(made(zero), size, count, 12345 + size))
            assert np.array_equal(found, kernels.of(zero).subset(zero, size, count, 12345 + size))
            assert len(found) == len(np.unique(found)) == count
            assert found[-1] < size
            assert (np.diff(found.astype(np.int64)) > 0).all()


@pytest.mark.parametrize(("size", "count"), [(2, 1), (3, 1), (5, 2), (7, 3), (33, 5)])
def test_every_element_and_every_pair_is_as_likely_in_a_subset(size, count):
    zero, draws = np.zeros(1), 8000
    random = np.random.default_rng(3)
    together = np.zeros((size, size))
    for _ in range(draws):
        chosen = kernels.of(zero).subset(zero, size, count, int(random.integers(1 << 63)))
        together[np.ix_(chosen, chosen)] += 1
    p = count / size
    assert np.abs(np.diag(together) / draws - p).max() <= 5 * np.sqrt(p * (1 - p) / draws)
    p = p * (count - 1) / (size - 1)
    pairs = together[~np.eye(size, dtype=bool)] / draws
    assert np.abs(pairs - p).max() <= 5 * np.sqrt(p * (1 - p) / draws) + 1e-12


@each_kind
def test_scatter_and_gather(kind):
    k, made = kind
    array, indices = normal(100), np.array([0, 5, 99], np.uint32)
    given = made(array.copy())
    where = k.all_indices(given, 100)[[0, 5, 99]]
    values = k.gathered(given, where)
    assert np.array_equal(plain(values), array[indices])
    filled = np.zeros(100, np.float32)
    filled[indices] = array[indices]
    assert np.array_equal(plain(k.scattered(where, values, 100)), filled)
    k.scatter_add(given, where, values, -0.5)
    assert np.allclose(plain(given), array - filled / 2)
    assert np.array_equal(plain(k.indices_from(k.index_bytes(where))), indices)
    assert k.ascending(where, 100)
    assert not k.ascending(where, 99)
    assert not k.ascending(where[[1, 0, 2]], 100)
    assert plain(k.filled_up(where[1:], 4)).tolist() == [0, 1, 5, 99]
    assert bytes(k.number_bytes(given, 0x0102, 4).tolist()) == b"\x02\x01\x00\x00"


@each_kind
def test_bins_reached_is_the_rule_element_by_element(kind):
    k, made = kind
    total, change = normal(203), normal(203, seed=1)
    total[50:100] = 0
    given = made(total)
    codes, counts, scale = k.bins_reached(given, made(change), 50, 1e9)
    wanted, largest_of = [], []
    for start in range(0, 203, 50):
        g, h = total[start : start + 50], np.abs(total + change)[start : start + 50]
        largest_of.append(np.abs(g).max())
        hits = np.flatnonzero((h >= np.abs(g).max()) & (g != 0)).tolist()
        wanted.append([start + j for j in hits or ([np.abs(g).argmax()] if g.any() else [])])
    assert plain(counts).tolist() == list(map(len, wanted))
    assert plain(k.from_buckets(codes >> 1, 50, counts)).tolist() == [j for of_bin in wanted for j in of_bin]
    assert plain(codes & 1).tolist() == [int(total[j] < 0) for of_bin in wanted for j in of_bin]
    assert scale == pytest.approx(np.mean(np.array(largest_of, np.float64)), rel=1e-12)
