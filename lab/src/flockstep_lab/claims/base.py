"""The base class of claims: a published result, its setting and tolerance, and the method that checks it."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from flockstep.expression import Component

Say = Callable[[str], None]
"""Function that shows one line of progress to the user."""


@dataclass(frozen=True)
class ClaimRow:
    """One figure of a claim: the published (or computed) value, the reproduced value, and whether the two agree."""

    what: str
    published: float | str
    ours: float | str
    holds: bool


def near(what: str, published: float, ours: float, tolerance: float) -> ClaimRow:
    """Return a row that holds if `ours` differs from `published` by at most `tolerance`, as a fraction of
    `published`.
    """
    return ClaimRow(what, published, ours, abs(ours / published - 1) <= tolerance)


def same(what: str, published: float | str, ours: float | str) -> ClaimRow:
    """Return a row that holds if `ours` equals `published`."""
    return ClaimRow(what, published, ours, ours == published)


def bounded(what: str, published: str, ours: float, shown: float | str | None = None) -> ClaimRow:
    """Return a row that holds if `ours` is within the bound with which `published` ends, such as "<= 2.5"; the text
    must give the bound exactly.

    `shown` takes the place of `ours` in the row, for example a rounded figure or a range.
    """
    *_, sign, limit = published.split()
    return ClaimRow(what, published, ours if shown is None else shown, _COMPARISONS[sign](ours, float(limit)))


_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class Verdict:
    """Result of checking a claim: its rows, further figures, and a remark."""

    rows: tuple[ClaimRow, ...]
    reason: str = ""
    """Explanation for the reader: why a row fails, as far as measurements show, or a remark on the figures."""
    figures: dict[str, float] = field(default_factory=dict)
    """Name → measured figure, for figures that are reported but not checked."""

    @property
    def holds(self) -> bool:
        """Whether the claim holds, which means that every row holds."""
        return all(row.holds for row in self.rows)


class Claim(Component):
    """A published result that flockstep can check: its source, its setting, and a method that reproduces its
    figures.
    """

    noun: ClassVar[str] = "claim"
    statement: ClassVar[str]
    """The claim in one sentence."""
    source: ClassVar[str]
    """Source of the claim: authors, year, and place in the paper."""
    setting: ClassVar[str]
    """Setting of the reproduction: problem, number of workers, virtual or real time, seeds."""
    tolerance: ClassVar[str]
    """Tolerance of the check, in words: the bounds within which each figure must lie."""
    quick: ClassVar[bool] = False
    """Whether the check takes at most a few seconds. The test suite runs quick checks."""

    @abstractmethod
    def check(self, say: Say) -> Verdict:
        """Check the claim, and report progress to `say`.

        Unless the claim uses real processes, every call gives equal figures.
        """
