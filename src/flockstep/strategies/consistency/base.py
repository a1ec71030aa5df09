"""The contract of a consistency rule: which reads a parameter server admits now, and which gradients it applies now.

A worker's clock counts the gradients it has pushed; a gradient's timestamp is that clock before it was pushed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import ClassVar, Literal

import msgspec

from flockstep.arrays.schema import FlatArray
from flockstep.expression import Component
from flockstep.strategies.access import Access, Asks
from flockstep.strategies.server_state import Push as Push
from flockstep.strategies.server_state import Read as Read


class View(msgspec.Struct, eq=False):
    """What a rule may look at besides what is pending."""

    slowest: int
    """The least clock of the live workers."""
    workers: int
    """Number of workers that the run began with (lambda, P or n in the literature)."""
    live: int
    """Workers that have neither died nor come to their end."""
    lost: int
    """Workers that died."""
    version: int
    """Updates applied so far."""
    reading: Mapping[int, int]
    """Live worker that waits for nothing → the version that it computes on."""
    params: FlatArray
    """The parameters as they are now."""
    kept: dict[int, FlatArray]
    """Old versions that the rule has kept."""
    moved: bool
    """Whether the slowest clock has moved, or somebody has left, since the rule was asked last."""
    waiting: Callable[[int], bool]
    """Whether a worker, by rank, has pushed a gradient that is neither applied nor dropped."""


class Consistency(Component):
    """Which reads are admitted, and which gradients are released, from what is pending."""

    noun: ClassVar[str] = "consistency"

    @property
    def access(self) -> Access:
        """How workers come by the parameters."""
        return Asks()

    @property
    def gathers(self) -> int:
        """Gradients of different workers that a step waits for, as in `Traits`."""
        return 0

    @property
    @abstractmethod
    def completeness(self) -> Literal[1, 2, 3, 4]:
        """FAST class: 1 synchronous, 2 bounded delay, 3 unbounded delay, 4 where gradients are dropped."""

    @property
    @abstractmethod
    def survives(self) -> bool | int:
        """Deaths after which the others still go on: a number, False for none, True for any number."""

    @property
    def least(self) -> int:
        """Workers that must be left for the others to go on."""
        return 1

    @abstractmethod
    def full_step(self, workers: int) -> int:
        """Number of gradients that make a full step; each counts as its inverse, however many are released together."""

    def check(self, workers: int) -> None:
        """Raise `ConfigurationError` unless the rule makes sense for that many workers."""

    @abstractmethod
    def admitted(self, reads: Sequence[Read], view: View) -> list[Read]:
        """Those that are answered now."""

    @abstractmethod
    def released(self, pending: Sequence[Push], view: View) -> list[list[Push]]:
        """The groups of gradients to apply now, in order; m of them make m / full_step of a step along their mean."""

    def keep(self, kept: dict[int, FlatArray], version: int, params: FlatArray) -> None:
        """There is a new version, which a rule may copy to `kept`."""

    def dropped(self, pending: Sequence[Push], view: View) -> list[Push]:
        """Those that will never be applied."""
        return []

    def flushed(self, pending: Sequence[Push], view: View) -> list[list[Push]]:
        """The groups to apply of what is left when everyone has gone."""
        return []


class ClockRule(Consistency):
    """A rule that decides from the clocks alone; `slowest` is the least clock of the live workers.

    As long as that stands still, nothing changes for those that wait already: only the newest is looked at.
    """

    @abstractmethod
    def admits(self, clock: int, slowest: int) -> bool:
        """Whether a worker at `clock` may read the parameters now."""

    @abstractmethod
    def releases(self, pending: Sequence[Push], slowest: int) -> list[list[Push]]:
        """The groups of gradients to apply now, in order."""

    def admitted(self, reads: Sequence[Read], view: View) -> list[Read]:
        """Those whose clocks are admitted."""
        return [read for read in (reads if view.moved else reads[-1:]) if self.admits(read.clock, view.slowest)]

    def released(self, pending: Sequence[Push], view: View) -> list[list[Push]]:
        """As the clocks say."""
        return self.releases(pending if view.moved else pending[-1:], view.slowest)


def by_timestamp(pushes: Sequence[Push]) -> list[list[Push]]:
    """Groups of equal timestamp, oldest first, each in order of rank."""
    ordered = sorted(pushes, key=attrgetter("timestamp", "rank"))
    return [list(group) for _, group in groupby(ordered, attrgetter("timestamp"))]
