"""Primitives for low-rank factors and cosine transforms: numpy's and torch's against plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flockstep.arrays import kernels
from flockstep.arrays.namespace import zeros
from support.kernels import each_kind, plain

torch = pytest.importorskip("torch")


def rng(seed=0):
    return np.random.default_rng(seed)


def gram_schmidt(matrix):
    """Column by column, twice over, in float64; columns that do not depend on others."""
    basis = []
    for column in matrix.T.astype(np.float64):
        for _ in range(2):
            for other in basis:
                column = column - sum(a * b for a, b in zip(other, column, strict=True)) * other
        basis.append(column / math.sqrt(sum(c * c for c in column)))
    return np.array(basis).T


@each_kind
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 1), (30, 4), (5, 5)])
def test_orthonormal_is_gram_schmidt(kind, rows, columns, dtype):
    k, made = kind
    matrix = rng().normal(size=(rows, columns)).astype(dtype)
    basis = plain(k.orthonormal(made(matrix)))
    assert basis.dtype == matrix.dtype
    assert np.allclose(basis, gram_schmidt(matrix), rtol=0, atol=8 * np.finfo(dtype).eps)
    laid_out_otherwise = plain(k.orthonormal(made(np.asfortranarray(matrix))))
    assert basis.tobytes() == laid_out_otherwise.tobytes()


@each_kind
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_orthonormal_whatever_depends_on_what(kind, dtype):
    k, made = kind
    column = rng().normal(size=(20, 1))
    huge, tiny = (1e30, 1e-30) if dtype == "float32" else (1e200, 1e-200)
    for matrix in (np.zeros((20, 3)), np.hstack([column] * 3), column * [huge, tiny, 0], np.ones((3, 3))):
        given = matrix.astype(dtype)
        basis = plain(k.orthonormal(made(given))).astype(np.float64)
        assert np.allclose(basis.T @ basis, np.eye(3), rtol=0, atol=8 * np.finfo(dtype).eps)
        if matrix.any():
            first = gram_schmidt(matrix[:, :1] / np.abs(matrix).max())[:, 0]
            assert np.allclose(basis[:, 0], first, rtol=0, atol=8 * np.finfo(dtype).eps)


@each_kind
@pytest.mark.parametrize("out_dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("scale", [1.0, -0.3])
@pytest.mark.parametrize(("n", "m", "r"), [(1, 1, 1), (40, 7, 3), (3, 20000, 2)])
def test_add_product_in_every_bit(kind, n, m, r, scale, out_dtype):
    k, made = kind
    dtype = "float64" if out_dtype == "float64" else "float32"
    left, right = rng().normal(size=(n, r)).astype(dtype), rng(1).normal(size=(m, r)).astype(dtype)
    out = rng(2).normal(size=n * m).astype(out_dtype)
    product = left[:, :1] * right[:, 0]
    for index in range(1, r):
        product = product + left[:, index : index + 1] * right[:, index]
    if scale != 1:
        product = product * product.dtype.type(scale)
    wanted = out + product.ravel().astype(out_dtype)
    given = made(out.copy())
    k.add_product(made(left), made(right), given, scale)
    assert plain(given).tobytes() == wanted.tobytes()


@each_kind
def test_cosines_by_their_definition(kind):
    k, made = kind
    for n in (1, 2, 9, 64):
        wanted = [[math.cos(math.pi * (i + 0.5) * f / n) for i in range(n)] for f in range(n)]
        scale = np.sqrt(np.where(np.arange(n) == 0, 1, 2) / n)[:, None]
        like = made(np.empty(0))
        assert np.allclose(plain(k.cosines(like, n)), scale * wanted, rtol=0, atol=1e-14)


@each_kind
@pytest.mark.parametrize(
    ("rows", "columns", "height", "width"), [(6, 8, 3, 2), (1, 9, 1, 3), (4, 4, 4, 4), (5, 1, 1, 1)]
)
def test_tiles_and_back(kind, rows, columns, height, width):
    k, made = kind
    matrix = rng().normal(size=(rows, columns))
    tiles = k.tiles(made(matrix), height, width)
    corners = [(i, j) for i in range(0, rows, height) for j in range(0, columns, width)]
    assert np.array_equal(plain(tiles), [matrix[i : i + height, j : j + width] for i, j in corners])
    assert np.array_equal(plain(k.untiled(tiles, rows, columns)), matrix)


@each_kind
@pytest.mark.parametrize("count", [1, 3, 7, 12])
def test_the_largest_of_buckets_are_the_first_among_equals(kind, count):
    k, made = kind
    rows = np.concatenate([rng().normal(size=(5, 12)), rng(1).integers(-2, 3, (20, 12)), np.zeros((1, 12))])
    wanted = [sorted(sorted(range(12), key=lambda i: (-abs(row[i]), i))[:count]) for row in rows]
    spots = k.largest_of_buckets(made(rows.ravel()), 12, np.full(len(rows), count))
    assert np.array_equal(plain(k.within_buckets(spots, 12)).reshape(-1, count), wanted)
    values = k.gathered(made(rows.ravel()), spots)
    chosen = [row[i] for row, spot in zip(rows, wanted, strict=True) for i in spot]
    assert np.array_equal(plain(values), chosen)
    kept = [x if i in spot else 0 for row, spot in zip(rows, wanted, strict=True) for i, x in enumerate(row)]
    assert np.array_equal(plain(k.scattered(spots, values, rows.size)), kept)


@each_kind
@pytest.mark.parametrize("bits", [0, 1, 5, 8, 13, 22])
@pytest.mark.parametrize("count", [1, 8, 29])
def test_integers_in_bits(kind, bits, count):
    k, made = kind
    numbers = rng().integers(0, 2**bits, count)
    data = k.packed_integers(made(numbers), bits)
    stream = sum(int(n) << (bits * i) for i, n in enumerate(numbers))
    assert plain(data).dtype == np.uint8
    assert plain(data).tobytes() == stream.to_bytes(-(-count * bits // 8), "little")
    assert plain(k.unpacked_integers(data, count, bits)).tolist() == numbers.tolist()


def test_the_same_normal_numbers_and_zeros():
    for dtype in ("float32", "float64"):
        here = kernels.of(np.empty(0)).gaussian(np.empty(0, dtype), 5, 3, 7)
        there = kernels.of(torch.empty(0)).gaussian(torch.empty(0, dtype=getattr(torch, dtype)), 5, 3, 7)
        assert here.tobytes() == there.numpy().tobytes()
        for like in (np.empty(0), torch.empty(0)):
            there = plain(zeros(like, 4, dtype=dtype))
            assert (there.dtype, there.tolist()) == (np.dtype(dtype), [0] * 4)
