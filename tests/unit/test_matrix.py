"""Which cases of a matrix run at every push, and what a test may not leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.leaks import left, shared
from support.matrix import covering, each, few
from support.order import mixed

SETTINGS = Path(__file__).parents[2] / "pyproject.toml"


def test_each_value_of_crossed_parameters_is_covered_by_as_many_cases_as_the_longest_has_values() -> None:
    cases = [frozenset({("a", a), ("b", b), ("c", c)}) for a, b, c in product(range(3), range(5), range(2))]
    kept = covering(cases)
    assert len(kept) == 5
    assert frozenset().union(*(cases[number] for number in kept)) == frozenset().union(*cases)


def test_of_one_list_all_are_covered() -> None:
    assert covering([frozenset({("a", a), ("b", a)}) for a in range(7)]) == set(range(7))


def test_few_are_left_without_a_mark() -> None:
    marked = few(["a", "b", ("c", 1)], "b")
    assert marked[1] == "b"
    assert [(one.values, [mark.name for mark in one.marks]) for one in marked[::2]] == [
        (("a",), ["full"]),
        (("c", 1), ["full"]),
    ]
    with pytest.raises(AssertionError, match="these are no cases"):
        few(["a"], "d")
    with pytest.raises(AssertionError, match="choose a case for every push"):
        few(["a"])


@pytest.mark.parametrize("marked", few([False, True], True))
def test_a_mark_that_keeps_the_chosen_from_every_push_is_refused(marked: bool, tmp_path: Path) -> None:
    case = """
import pytest
from support.matrix import few

@pytest.mark.parametrize("n", few([1, 2], 1))
@pytest.mark.parametrize("k", few([1, 2], 1))
{mark}
def test_it(n, k): pass
"""
    (tmp_path / "test_it.py").write_text(case.format(mark="@pytest.mark.full" if marked else ""))
    words = ["-q", "--collect-only", "-m", "not full", "-p", "no:cacheprovider", "-p", "conftest", "-c", str(SETTINGS)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ("the test's own mark full keeps them" in done.stderr, "1/4 tests collected" in done.stdout) == (
        marked,
        not marked,
    )


def test_all_that_fail_are_told_at_once() -> None:
    def check(n: int, text: str) -> None:
        assert n % 2, text

    with pytest.raises(ExceptionGroup, match="2 of 3 cases fail") as caught:
        each(check, [(1, "one"), (2, "two"), (4, "four")])
    assert [error.__notes__ for error in caught.value.exceptions] == [["in case (2, 'two')"], ["in case (4, 'four')"]]
    each(check, [(1, "one")])
    with pytest.raises(AssertionError, match="there are no cases"):
        each(check, [])


def test_what_is_left_behind_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = shared()
    assert left(before) == []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "LEFT_BEHIND", "1")
    with np.errstate(divide="raise"):
        names = [one.partition(" was ")[0] for one in left(before)]
    assert names == ["the working folder", "numpy's handling of errors", "$LEFT_BEHIND"]


def test_files_that_wait_and_files_that_compute_are_taken_in_turn_and_long_ones_first() -> None:
    def items(file: str, count: int) -> list[Any]:
        return [SimpleNamespace(path=Path(file), name=f"{file}:{number}") for number in range(count)]

    given = [
        ("faults/a.py", 1),
        ("end_to_end/b.py", 3),
        ("unit/c.py", 2),
        ("laws/d.py", 5),
        ("unit/e.py", 1),
        ("unit/f.py", 1),
    ]
    tests = [item for file, count in given for item in items(file, count)]
    found = mixed(tests)
    assert list(dict.fromkeys(str(item.path) for item in found)) == [
        "laws/d.py", "end_to_end/b.py", "unit/c.py", "unit/e.py", "faults/a.py", "unit/f.py",
    ]  # fmt: skip
    for file, count in given:
        at = [number for number, item in enumerate(found) if str(item.path) == file]
        assert at == list(range(at[0], at[0] + count)), "a file's tests stay together, in their order"
