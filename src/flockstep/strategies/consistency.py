"""Which reads a parameter server admits now, and which gradients it applies now.

A worker's clock counts the gradients that it has pushed; a gradient's timestamp is its worker's clock before it was
pushed. Both rules below speak of the slowest live worker's clock.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import ClassVar, Literal

from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError
from flockstep.expression import SHOWN, Component


@dataclass(frozen=True, eq=False)
class Push:
    """A gradient that a server has received and not applied."""

    rank: int
    timestamp: int
    version: int
    """The server's version that it was computed on."""
    lr: float
    gradient: FlatArray


class Consistency(Component):
    """Decides from the clocks alone; `slowest` is the least clock of the live workers."""

    noun: ClassVar[str] = "consistency"

    @property
    @abstractmethod
    def completeness(self) -> Literal[1, 2, 3]:
        """Class on FAST's spectrum: 1 synchronous, 2 bounded delay, 3 unbounded delay."""

    @property
    @abstractmethod
    def survives(self) -> bool:
        """The others go on when a worker dies."""

    @abstractmethod
    def admits(self, clock: int, slowest: int) -> bool:
        """Whether a worker at `clock` may read the parameters now."""

    @abstractmethod
    def releases(self, pending: Sequence[Push], slowest: int) -> list[list[Push]]:
        """The groups of gradients to apply now, in order; each group becomes one step with its mean."""


@dataclass(frozen=True)
class StaleSynchronous(Consistency):
    """Stale synchronous parallel (Ho et al. 2013), staleness bound s in clocks.

    A read at clock c waits until it can see every update with timestamp <= c - s - 1, and is never shown one with
    timestamp > c + s - 1: a gradient with timestamp t is applied once the slowest clock has reached t - s + 1. A
    worker's own updates are always visible to it. Gradients of the same timestamp that become applicable together are
    averaged into one step, so that s = 0 is bulk synchronous, bit for bit, and a bound that never binds is
    asynchronous; the paper, which has no server-side optimiser, adds them one by one. A dead worker is taken out of the
    slowest clock, so the others go on; with s = 0 they would silently train with a smaller batch, so there they stop.
    """

    s: int = field(default=3, metadata=SHOWN)

    def __post_init__(self) -> None:
        if self.s < 0:
            raise ConfigurationError(f"staleness bound must be >= 0, got {self.s}; use asynchronous for no bound")

    @property
    def completeness(self) -> Literal[1, 2, 3]:
        """Bounded delay; none with s = 0."""
        return 2 if self.s else 1

    @property
    def survives(self) -> bool:
        """A dead worker's clock no longer counts."""
        return self.s > 0

    def admits(self, clock: int, slowest: int) -> bool:
        """c - s <= slowest clock."""
        return clock - self.s <= slowest

    def releases(self, pending: Sequence[Push], slowest: int) -> list[list[Push]]:
        """Those with t - s + 1 <= slowest clock, by timestamp, then rank."""
        return by_timestamp([push for push in pending if push.timestamp - self.s + 1 <= slowest])


@dataclass(frozen=True)
class BulkSynchronous(Consistency):
    """Bulk synchronous parallel (Valiant 1990): everyone's gradients of a step, averaged, before anyone goes on."""

    @property
    def completeness(self) -> Literal[1, 2, 3]:
        """Synchronous."""
        return 1

    @property
    def survives(self) -> bool:
        """A dead worker stops everyone."""
        return False

    def admits(self, clock: int, slowest: int) -> bool:
        """Everyone has pushed as often as the reader."""
        return clock <= slowest

    def releases(self, pending: Sequence[Push], slowest: int) -> list[list[Push]]:
        """Those of steps that everyone has pushed."""
        return by_timestamp([push for push in pending if push.timestamp < slowest])


@dataclass(frozen=True)
class Asynchronous(Consistency):
    """No bound (Dean et al. 2012, Downpour SGD with n_push = n_fetch = 1): every gradient on arrival, every read."""

    @property
    def completeness(self) -> Literal[1, 2, 3]:
        """Unbounded delay."""
        return 3

    @property
    def survives(self) -> bool:
        """Nobody waits for anybody."""
        return True

    def admits(self, clock: int, slowest: int) -> bool:
        """Always."""
        return True

    def releases(self, pending: Sequence[Push], slowest: int) -> list[list[Push]]:
        """Each at once."""
        return [[push] for push in pending]


def by_timestamp(pushes: Sequence[Push]) -> list[list[Push]]:
    """Groups of equal timestamp, oldest first, each in order of rank."""
    ordered = sorted(pushes, key=lambda push: (push.timestamp, push.rank))
    return [list(group) for _, group in groupby(ordered, key=lambda push: push.timestamp)]
