"""The interface of a claim."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from flockstep.expression import Component

Say = Callable[[str], None]
"""Function that shows one line of progress."""


@dataclass(frozen=True)
class ClaimRow:
    """One figure of a claim: the published (or computed) value, the reproduced value, and whether the two agree."""

    what: str
    published: float | str
    ours: float | str
    holds: bool


def near(what: str, published: float, ours: float, tolerance: float) -> ClaimRow:
    """Return a row that holds if `ours` and `published` differ by at most `tolerance`, relatively."""
    return ClaimRow(what, published, ours, abs(ours / published - 1) <= tolerance)


@dataclass(frozen=True)
class Verdict:
    """Result of checking a claim."""

    rows: tuple[ClaimRow, ...]
    reason: str = ""
    """The measured reason if a row fails; otherwise a remark for the reader."""
    figures: dict[str, float] = field(default_factory=dict)
    """Name → measured figure that is not in the rows."""

    @property
    def holds(self) -> bool:
        """Whether the claim holds, which means that every row holds."""
        return all(row.holds for row in self.rows)


class Claim(Component):
    """A published result, and how to reproduce it with flockstep."""

    noun: ClassVar[str] = "claim"
    statement: ClassVar[str]
    """The claim in one sentence."""
    source: ClassVar[str]
    """Authors, year, and place in the paper."""
    setting: ClassVar[str]
    """Setting of the reproduction: problem, number of workers, virtual or real time, seeds."""
    tolerance: ClassVar[str]
    """The asserted bounds, in words."""
    quick: ClassVar[bool] = False
    """Whether the check takes a few seconds at most, so that the tests run it."""

    @abstractmethod
    def check(self, say: Say) -> Verdict:
        """Check the claim. Unless the claim uses real processes, every call gives equal figures."""
