"""The contract of a consistency rule: which reads a parameter server admits now, and which gradients it applies now.

A worker's clock counts the gradients it has pushed; a gradient's timestamp is that clock before it was pushed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, Literal

from flockstep.arrays.schema import FlatArray
from flockstep.expression import Component
from flockstep.messages import Message


@dataclass(frozen=True, eq=False)
class Push:
    """A gradient that a server has received and not applied."""

    rank: int
    timestamp: int
    version: int
    """The server's version that it was computed on."""
    lr: float
    gradient: FlatArray


@dataclass(frozen=True, eq=False)
class Read:
    """A worker that waits for parameters."""

    rank: int
    clock: int
    version: int
    """The version that it has."""
    message: Message


@dataclass(frozen=True)
class View:
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
    computing: int
    """Live workers that wait for nothing."""
    drift: Callable[[], float]
    """The largest absolute change of a parameter since the oldest version that somebody computes on."""
    waiting: Callable[[int], bool]
    """Whether a worker, by rank, has pushed a gradient that is neither applied nor dropped."""


class Consistency(Component):
    """Which reads are admitted, and which gradients are released, from what is pending."""

    noun: ClassVar[str] = "consistency"
    by_clocks: ClassVar[bool] = False
    """Nothing changes for those that wait already as long as the slowest clock stands still."""
    eager: ClassVar[bool] = False
    """Servers send fresh parameters to everyone whenever the slowest clock advances, instead of when asked."""
    keeps_copies: ClassVar[bool] = False
    """Workers compute on a copy of their own, and do not ask for parameters with every push."""
    gives_up: ClassVar[bool] = False
    """Workers give up a gradient of an older version as soon as there is a newer one."""
    gathers: int = 0
    """Gradients of different workers that a step waits for, as in `Traits`."""
    bounds_values: ClassVar[bool] = False
    """It looks at `View.drift`, for which old versions are kept."""

    @property
    def slack(self) -> int:
        """Clocks by which a worker's copy may lag behind it, where workers keep copies."""
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

    def dropped(self, pending: Sequence[Push], view: View) -> list[Push]:
        """Those that will never be applied."""
        return []

    def flushed(self, pending: Sequence[Push], view: View) -> list[list[Push]]:
        """The groups to apply of what is left when everyone has gone."""
        return []


class ClockRule(Consistency):
    """A rule that decides from the clocks alone; `slowest` is the least clock of the live workers."""

    by_clocks: ClassVar[bool] = True

    @abstractmethod
    def admits(self, clock: int, slowest: int) -> bool:
        """Whether a worker at `clock` may read the parameters now."""

    @abstractmethod
    def releases(self, pending: Sequence[Push], slowest: int) -> list[list[Push]]:
        """The groups of gradients to apply now, in order."""

    def admitted(self, reads: Sequence[Read], view: View) -> list[Read]:
        """Those whose clocks are admitted."""
        return [read for read in reads if self.admits(read.clock, view.slowest)]

    def released(self, pending: Sequence[Push], view: View) -> list[list[Push]]:
        """As the clocks say."""
        return self.releases(pending, view.slowest)


def by_timestamp(pushes: Sequence[Push]) -> list[list[Push]]:
    """Groups of equal timestamp, oldest first, each in order of rank."""
    ordered = sorted(pushes, key=lambda push: (push.timestamp, push.rank))
    return [list(group) for _, group in groupby(ordered, key=lambda push: push.timestamp)]
