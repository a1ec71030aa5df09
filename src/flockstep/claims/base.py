"""The contract of a claim."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from flockstep.expression import Component

Say = Callable[[str], None]
"""Takes a line of progress."""


@dataclass(frozen=True)
class Row:
    """One figure of a claim: what was published (or follows from the formula), what we got, and whether that holds."""

    what: str
    published: float | str
    ours: float | str
    holds: bool


def near(what: str, published: float, ours: float, tolerance: float) -> Row:
    """A row that holds where the two differ by that share at most."""
    return Row(what, published, ours, abs(ours / published - 1) <= tolerance)


@dataclass(frozen=True)
class Verdict:
    """What became of a claim."""

    rows: tuple[Row, ...]
    reason: str = ""
    """Where a row does not hold: why, as far as a measurement tells. Otherwise what the reader should know."""
    figures: dict[str, float] = field(default_factory=dict)
    """Further figures, by name."""

    @property
    def holds(self) -> bool:
        """Whether every row does."""
        return all(row.holds for row in self.rows)


class Claim(Component):
    """A published result, and how to get it here."""

    noun: ClassVar[str] = "claim"
    statement: ClassVar[str]
    """The claim in one sentence."""
    source: ClassVar[str]
    """Authors, year, and where in the paper."""
    setting: ClassVar[str]
    """How it is tried here: problem, workers, clock, seeds."""
    tolerance: ClassVar[str]
    """What is asserted."""
    quick: ClassVar[bool] = False
    """It takes a few seconds at most, so that the tests run it."""

    @abstractmethod
    def check(self, say: Say) -> Verdict:
        """Try it; the same figures every time, unless it uses real processes."""
