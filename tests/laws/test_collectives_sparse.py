"""Sparse all-reduce: the same sum as a dense one in the same order, the bytes of its streams, the switch at δ."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from flockstep.arrays.kernels import numpy_dtype
from flockstep.arrays.schema import slices
from flockstep.codecs.base import Codec
from flockstep.codecs.half import Half
from flockstep.codecs.identity import Identity
from flockstep.collectives.ring import Ring
from flockstep.collectives.sparse import Sparse, expected_elements
from flockstep.collectives.streams import Stream, threshold
from flockstep.errors import ProtocolError
from flockstep.testing.strategies import bowl_job, equal_bits, run_strategy
from support.collectives import does

WORKERS = range(1, 10)


@dataclass(frozen=True)
class NonZero(Codec):
    """A codec that sends the non-zero elements as pairs of index and value."""

    exact: bool = False

    @property
    def lossless(self):
        return True

    @property
    def sparse(self):
        return True

    @property
    def exact_size(self):
        return self.exact

    def wire_bytes(self, size, dtype):
        return size * (4 + np.dtype(dtype).itemsize)

    def encode(self, array, random):
        found = np.flatnonzero(array)
        return np.concatenate([found.astype("<u4").view(np.uint8), array[found].view(np.uint8)])

    def decode(self, data, size, dtype):
        indices, values = self.stream(data, size, dtype)
        array = np.zeros(size, dtype)
        array[indices] = values
        return array

    def stream(self, data, size, dtype):
        count = len(data) // (4 + np.dtype(dtype).itemsize)
        return data[: 4 * count].view("<u4"), data[4 * count :].view(dtype)

    def error_bound(self, array):
        return 0.0


def summed(collective, given, codec=None, **options):
    """The run in which all workers sum the encodings of `given[rank]`, and the sum on each rank."""
    codec = codec or NonZero()

    async def sum_encoded(me, row):
        return await collective.sum_encoded(me, codec.encode(row, me.random), codec, len(row), row.dtype.name)

    run, got = does(sum_encoded, given[:, None], **options)
    return run, [total for total, _ in got]


def rows_of(n, size, density, dtype="float32", seed=0):
    random = np.random.default_rng(seed)
    rows = random.normal(size=(n, size)).astype(dtype)
    rows[random.random((n, size)) >= density] = 0
    return rows


def ordered_sum(rows):
    total = rows[0] + rows.dtype.type(0)
    for row in rows[1:]:
        total = total + row
    return total


def doubling_sum(rows):
    power = 1 << (len(rows).bit_length() - 1)
    level = [rows[i] + rows[i + power] if i + power < len(rows) else rows[i] + 0 * rows[i] for i in range(power)]
    while len(level) > 1:
        level = [level[i] + level[i + 1] for i in range(0, len(level), 2)]
    return level[0]


ORACLES = {"ssar_doubling": doubling_sum, "ssar_split": ordered_sum, "dsar": ordered_sum}


@pytest.mark.oracle("collective:sparse")
@pytest.mark.parametrize("algorithm", ORACLES)
@pytest.mark.parametrize("n", WORKERS)
def test_it_is_the_dense_sum_in_the_same_order(algorithm, n):
    for size in sorted({0, 1, 7, n - 1, n, n + 1, 1000}):
        for density in (0.0, 0.05, 0.3, 0.5, 1.0):
            for dtype in ("float32", "float64"):
                rows = rows_of(n, size, density, dtype, seed=size)
                _, got = summed(Sparse(algorithm), rows)
                assert equal_bits(ORACLES[algorithm](rows), *got)


@pytest.mark.parametrize("algorithm", [*ORACLES, "auto"])
@pytest.mark.parametrize("density", [0.01, 1.0])
@pytest.mark.parametrize("n", [1, 3, 6])
def test_the_sum_is_the_callers_to_change(algorithm, density, n):
    rows = rows_of(n, 60, density)
    _, got = summed(Sparse(algorithm), rows)
    before = got[0].copy()
    for array in got[1:]:
        array += 1
    assert equal_bits(before, got[0])
    got[0] += 1
    assert not equal_bits(before, got[0])


def split_streams(rows):
    """What each rank sends in the first phase, in elements of streams, as lists of (nnz, part's size)."""
    n, size = rows.shape
    parts = slices(size, n)
    return [[(np.count_nonzero(rows[r, p]), p.stop - p.start) for j, p in enumerate(parts) if j != r] for r in range(n)]


def streamed(nnz, size, width):
    return nnz * (4 + width) if nnz <= size * width / (4 + width) else size * width


@pytest.mark.parametrize("n", [2, 4, 5, 8])
@pytest.mark.parametrize("density", [0.01, 0.2, 0.7])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bytes_are_those_of_the_streams(n, density, dtype):
    rows = rows_of(n, 600, density, dtype)
    width, parts = rows.itemsize, slices(600, n)
    first = [sum(streamed(nnz, size, width) for nnz, size in sent) for sent in split_streams(rows)]
    sums = [np.count_nonzero(np.any(rows[:, p] != 0, axis=0)) for p in parts]
    own = [streamed(nnz, p.stop - p.start, width) for nnz, p in zip(sums, parts, strict=True)]
    run, _ = summed(Sparse("ssar_split"), rows)
    passed = [sum(own) - own[(rank + 1) % n] for rank in range(n)]
    assert [node.sent_bytes for node in run.totals.values()] == [a + b for a, b in zip(first, passed, strict=True)]
    assert [node.messages_sent for node in run.totals.values()] == [2 * (n - 1)] * n
    run, _ = summed(Sparse("dsar"), rows)
    dense = [600 - (parts[(rank + 1) % n].stop - parts[(rank + 1) % n].start) for rank in range(n)]
    assert [node.sent_bytes for node in run.totals.values()] == [
        a + width * b for a, b in zip(first, dense, strict=True)
    ]


@pytest.mark.parametrize("density", [0.01, 0.2, 0.7])
def test_bytes_of_doubling_are_those_of_what_is_summed_by_then(density):
    rows = rows_of(8, 600, density)
    run, _ = summed(Sparse("ssar_doubling"), rows)
    expected = []
    for rank in range(8):
        union = [np.any(rows[(rank >> k) << k : ((rank >> k) + 1) << k] != 0, axis=0).sum() for k in range(3)]
        expected.append(sum(streamed(nnz, 600, 4) for nnz in union))
    assert [node.sent_bytes for node in run.totals.values()] == expected


@pytest.mark.parametrize(("dtype", "delta"), [("float32", 500), ("float64", 1000 * 8 / 12), ("float16", 1000 * 2 / 6)])
def test_the_switch_is_exactly_at_delta(dtype, delta):
    assert threshold(1000, np.dtype(dtype).itemsize) == delta
    for count in (int(delta), int(delta) + 1):
        stream = Stream.of(1000, np.ones(count, dtype), np.arange(count))
        assert (stream.indices is None) == (count > delta)
        low, high = np.arange(count // 2), np.arange(count // 2, count)
        both = Stream.of(1000, np.ones(len(low), dtype), low).plus(Stream.of(1000, np.ones(len(high), dtype), high))
        assert (both.indices is None) == (count > delta)
        again = Stream.arrived(both.wire, 1000, dtype)
        assert (again.indices is None) == (count > delta)
        assert equal_bits(again.dense(), both.dense())


def listed(*indices):
    """The bytes of a stream of ones at the given indices."""
    return np.concatenate([np.array(indices, "<u4").view(np.uint8), np.ones(len(indices), np.float32).view(np.uint8)])


@pytest.mark.parametrize(
    ("payload", "rule"),
    [
        (np.zeros(7, np.uint8), "7 bytes of uint8 cannot be a stream of 9 elements of float32"),
        (np.zeros(10, np.float32), "40 bytes of float32 cannot be a stream of 9 elements of float32"),
        (np.zeros(8, np.int64), "64 bytes of int64 cannot be a stream of 9 elements of float32"),
        (listed(3, 3), "the indices of a stream must be in ascending order and less than 9"),
        (listed(2, 9), "the indices of a stream must be in ascending order and less than 9"),
    ],
)
def test_what_is_no_stream_is_refused(payload, rule):
    with pytest.raises(ProtocolError, match=rule):
        Stream.arrived(payload, 9, "float32")


def test_what_is_not_sparse_goes_to_the_dense_collective():
    rows = rows_of(4, 50, 1.0)
    for codec in (Identity(), Half()):
        _, got = summed(Sparse(), rows, codec)
        _, dense = summed(Ring(), rows, codec)
        assert equal_bits(*got, *dense)


def test_auto_sums_a_linear_codec_without_indices():
    run = run_strategy("all_reduce(collective=sparse, codec=random_k(0.1))", 4, 3, job=bowl_job(dimension=800))
    ring = run_strategy("all_reduce(codec=random_k(0.1))", 4, 3, job=bowl_job(dimension=800))
    assert equal_bits(run.result, ring.result)
    assert run.totals == ring.totals
    named = run_strategy("all_reduce(collective=ssar_split, codec=random_k(0.1))", 4, 3, job=bowl_job(dimension=800))
    assert named.totals[0].sent_bytes > run.totals[0].sent_bytes


def test_the_second_phase_may_be_encoded():
    rows = rows_of(4, 80, 0.3)
    run, got = summed(Sparse("dsar", second=Half()), rows)
    assert equal_bits(ordered_sum(rows).astype(np.float16).astype(np.float32), *got)
    full, _ = summed(Sparse("dsar"), rows)
    saved = [a.sent_bytes - b.sent_bytes for a, b in zip(full.totals.values(), run.totals.values(), strict=True)]
    assert saved == [60 * 2] * 4


def test_auto_follows_fill_in_and_size():
    auto = Sparse()
    assert auto.choose(4, 10_000, "float32", 100) == "ssar_doubling"
    assert auto.choose(4, 10_000_000, "float32", 100_000) == "ssar_split"
    assert auto.choose(128, 10_000_000, "float32", 100_000) == "dsar"
    assert expected_elements(512, 16, 8) / 512 == pytest.approx(0.2243, abs=5e-5)
    assert expected_elements(100, 1, 16) / 100 == pytest.approx(0.1485, abs=5e-5)
    assert expected_elements(100, 1, 128) / 100 == pytest.approx(0.724, abs=5e-4)
    assert expected_elements(5, 5, 3) == 5
    assert expected_elements(0, 0, 3) == 0


@pytest.mark.parametrize("n", [1, 3, 8])
def test_all_ranks_choose_alike_though_their_streams_differ_in_size(n):
    rows = np.stack([rows_of(1, 500, 0.02 + 0.9 * rank / n, seed=rank)[0] for rank in range(n)])
    for codec in (NonZero(), NonZero(exact=True)):
        _, got = summed(Sparse(), rows, codec, compute="exponential(0.1)", network="link(1e5, 0.001)")
        assert any(equal_bits(oracle(rows), *got) for oracle in (doubling_sum, ordered_sum))


@pytest.mark.negative_control("collective:sparse")
def test_a_pair_too_few_or_another_order_is_noticed():
    rows = rows_of(6, 1000, 0.4)
    _, got = summed(Sparse("ssar_split"), rows)
    assert not equal_bits(doubling_sum(rows), got[0])
    lacking = rows.copy()
    lacking[3, np.flatnonzero(rows[3])[0]] = 0
    assert not equal_bits(ordered_sum(lacking), got[0])


def test_a_stream_of_bfloat16_stays_one():
    kind = numpy_dtype("bfloat16")
    stream = Stream.of(100, np.arange(8, dtype=np.float32).astype(kind), np.arange(8, dtype=np.uint32))
    assert stream.values.dtype == kind
    assert (Stream.arrived(stream.wire, 100, "bfloat16").values == stream.values).all()
