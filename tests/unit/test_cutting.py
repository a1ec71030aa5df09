"""Cutting a chain into parts: the optimum, against all cuts."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flockstep.costs.stages import balanced
from flockstep.errors import ConfigurationError

Units = list[tuple[int, int]]


def worst(units: Units, starts: list[int]) -> tuple[int, int]:
    """Time of the slowest part, and memory of the largest."""
    ends = [*starts[1:], len(units)]
    return tuple(  # type: ignore[return-value]
        max(sum(unit[which] for unit in units[start:end]) for start, end in zip(starts, ends, strict=True))
        for which in (0, 1)
    )


@given(
    units=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=9),
    parts=st.integers(1, 9),
)
def test_no_cut_is_better(units: Units, parts: int) -> None:
    if parts > len(units):
        with pytest.raises(
            ConfigurationError, match=rf"<= {len(units)}, the number of units .* got {parts}; use at most"
        ):
            balanced([unit[0] for unit in units], [unit[1] for unit in units], parts)
        return
    found = balanced([unit[0] for unit in units], [unit[1] for unit in units], parts)
    assert len(found) == parts
    assert found[0] == 0
    assert all(a < b for a, b in pairwise([*found, len(units)])), "every part has a unit"
    every = [[0, *cut] for cut in combinations(range(1, len(units)), parts - 1)]
    assert worst(units, found) == min(worst(units, cut) for cut in every)


def test_memory_decides_between_cuts_of_equal_time() -> None:
    assert balanced([4, 1, 1, 4], [1, 1, 8, 1], 2) == [0, 2]
    assert balanced([5, 0, 0, 5], [1, 1, 8, 8], 2) == [0, 3]
    assert balanced([5, 0, 0, 5], [8, 8, 1, 1], 2) == [0, 1]


def test_whole_layers_of_very_different_sizes() -> None:
    assert balanced([1e12, 1.0, 1.0, 1.0], [0.0] * 4, 2) == [0, 1]
    assert balanced([0.1] * 9, [1.0] * 9, 3) == [0, 3, 6]
