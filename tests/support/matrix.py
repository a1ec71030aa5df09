"""Which cases of a matrix run at every push: of crossed parameters each value once, of a list what is named."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import pytest

Values = frozenset[Hashable]
"""What a case consists of: a value for each list of parameters that is crossed with others."""


def few(cases: Iterable[Any], *chosen: Any) -> list[Any]:
    """All cases for `parametrize`; those that are not among `chosen` run under `make test-all` only."""
    cases = list(cases)
    unknown = [one for one in chosen if one not in cases]
    assert unknown == [], "these are no cases"
    assert chosen, "choose a case for every push"
    return [case if case in chosen else _full(case) for case in cases]


def _full(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.full)


def never_chosen(case: pytest.Function) -> bool:
    """Whether a case that `few` leaves to `make test-all` belongs to a test that is marked `full` as a whole.

    The chosen cases of such a test would not run at every push either.
    """
    by_few = any(mark.name == "full" for mark in case.callspec.marks)
    return by_few and len(list(case.iter_markers("full"))) > sum(mark.name == "full" for mark in case.callspec.marks)


def values(case: pytest.Function) -> Values:
    """Those of one case: what each of its `parametrize` gives it, and each of its fixtures that have parameters."""
    params = dict(case.callspec.params)

    def given() -> Iterator[Hashable]:
        for mark in case.iter_markers("parametrize"):
            names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
            yield tuple((name.strip(), id(params.pop(name.strip(), None))) for name in names)
        yield from ((name, id(value)) for name, value in params.items())

    return frozenset(given())


def covering(cases: Sequence[Values]) -> set[int]:
    """Numbers of few cases in which every value occurs: again and again the first that brings most new ones."""
    left, found = set[Hashable]().union(*cases), set[int]()
    while left:
        best = max(range(len(cases)), key=lambda number: len(cases[number] & left))
        found.add(best)
        left -= cases[best]
    return found


def each(check: Callable[..., None], cases: Iterable[Any]) -> None:
    """Check every case, and raise all that failed at once, each with its case."""
    cases, failures = list(cases), list[Exception]()
    assert cases, "there are no cases"
    for case in cases:
        try:
            check(*(case if isinstance(case, tuple) else (case,)))
        except Exception as error:  # noqa: BLE001
            error.add_note(f"in case {case}")
            failures.append(error)
    if failures:
        raise ExceptionGroup(f"{len(failures)} of {len(cases)} cases fail", failures)
