"""Sums that do not depend on the order: the grid, and the range in which additions on it are exact."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flockstep.arrays.exact_sum import GRID, LIMIT, ExactSum, on_grid
from flockstep.errors import Diverged


def updates(dtype, largest):
    width = np.dtype(dtype).itemsize * 8
    elements = st.floats(-largest, largest, width=width, allow_nan=False)
    return hnp.arrays(dtype, (8, 4), elements=elements)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@given(data=st.data())
def test_rounding_to_the_grid_is_exact_in_every_dtype(dtype, data):
    given_ = data.draw(updates(dtype, 512.0))
    rounded = on_grid(given_)
    assert rounded.dtype == given_.dtype
    for value, nearest in zip(given_.ravel().tolist(), rounded.ravel().tolist(), strict=True):
        assert (Fraction(nearest) / Fraction(GRID)).denominator == 1  # the value itself lies on the grid
        assert abs(Fraction(nearest) - Fraction(value)) <= Fraction(GRID) / 2
    assert on_grid(rounded).tobytes() == rounded.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(data=st.data())
def test_any_order_gives_the_same_bits_and_the_exact_sum(dtype, data):
    start, rows = np.arange(4).astype(dtype) / 3, on_grid(data.draw(updates(dtype, 512.0)))
    order = data.draw(st.permutations(range(8)))
    results = []
    for indices in (range(8), order):
        exact_sum, out = ExactSum.of(start), np.empty_like(start)
        for index in indices:
            exact_sum.add(rows[index])
        exact_sum.write(out)
        results.append((exact_sum.total.tobytes(), out.tobytes()))
    assert results[0] == results[1]
    whole = [
        sum((Fraction(float(row[k])) for row in rows), Fraction(float(on_grid(start.astype("f8"))[k])))
        for k in range(4)
    ]
    assert [Fraction(total) for total in exact_sum.total.tolist()] == whole
    assert out.tolist() == np.array([float(total) for total in whole]).astype(dtype).tolist()


def test_plain_floats_depend_on_the_order():
    """Negative control: sums of plain floats depend on the order, which is why exact sums exist."""
    rows = np.random.default_rng(0).normal(size=(200, 50)).astype(np.float32)
    forward, backward = np.zeros(50, np.float32), np.zeros(50, np.float32)
    for one, other in zip(rows, rows[::-1], strict=True):
        forward += one
        backward += other
    assert forward.tobytes() != backward.tobytes()


@pytest.mark.parametrize("total", [LIMIT, -LIMIT, 1e300, np.inf, np.nan])
def test_leaving_the_range_is_an_error(total):
    exact_sum, params = ExactSum.of(np.zeros(3)), np.zeros(3)
    exact_sum.add(np.array([0, total, 0]))
    with pytest.raises(Diverged, match=r"must be below 8192 in magnitude, got a larger one; lower the learning rate"):
        exact_sum.write(params)


def test_the_range_itself_is_fine():
    exact_sum, params = ExactSum.of(np.zeros(3)), np.zeros(3)
    exact_sum.add(np.array([0, LIMIT - GRID, GRID - LIMIT]))
    exact_sum.write(params)
    assert params.tolist() == [0, LIMIT - GRID, GRID - LIMIT]
    ExactSum.of(np.zeros(0)).write(np.zeros(0))
