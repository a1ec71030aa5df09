"""The interface of a consistency rule: which reads a parameter server admits now, and which gradients it applies now.

A worker's clock counts the gradients that the worker has pushed; a gradient's timestamp is the worker's clock before
the push.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import ClassVar

import msgspec

from flockstep.arrays.schema import FlatArray
from flockstep.expression import Component
from flockstep.strategies.access import Access, PushPull
from flockstep.strategies.server_state import Push as Push
from flockstep.strategies.server_state import Read as Read
from flockstep.strategies.traits import Delivery


class ConsistencyView(msgspec.Struct, eq=False):
    """The state of a server that a consistency rule may read, in addition to the pending reads and gradients."""

    slowest: int
    """The smallest clock of the live workers."""
    workers: int
    """Number of workers at the start of the run (lambda, P or n in the literature)."""
    live: int
    """Number of workers that have neither died nor finished."""
    lost: int
    """Number of workers that died."""
    version: int
    """Number of updates applied so far."""
    reading: Mapping[int, int]
    """Rank of each live worker that is not waiting → version with which the worker computes."""
    params: FlatArray
    """The current parameters, of shape (K,)."""
    kept: dict[int, FlatArray]
    """Version → copy of the parameters, for the old versions that the rule has kept."""
    moved: bool
    """Whether the slowest clock has advanced, or a worker has left, since the rule was last evaluated."""
    waiting: Callable[[int], bool]
    """Whether the worker of a given rank has pushed a gradient that is neither applied nor dropped yet."""


class Consistency(Component):
    """A rule that decides which pending reads are admitted and which pending gradients are applied."""

    noun: ClassVar[str] = "consistency"

    @property
    def access(self) -> Access:
        """The access mode with which workers obtain the parameters."""
        return PushPull()

    compares_versions: ClassVar[bool] = False
    """Whether the rule depends on old parameters, so that the server stores a copy of every version in `kept`; the rule
    deletes copies that it does not need any more.
    """
    one_each: ClassVar[bool] = False
    """Whether each group is a whole step with at most one gradient of each worker."""

    @property
    def alone(self) -> bool:
        """Whether every gradient is released alone, never in a group."""
        return False

    @property
    def gathers(self) -> int:
        """Number of gradients of different workers that a step waits for, as in `Traits.gathers`."""
        return 0

    @property
    @abstractmethod
    def delivery(self) -> Delivery:
        """The delivery guarantee of the gradients, as in `Traits.delivery`; "partial" if gradients are dropped."""

    @property
    @abstractmethod
    def survives(self) -> bool | int:
        """Number of worker deaths after which the other workers still continue: False for none, True for any number."""

    @property
    def least(self) -> int:
        """Minimum number of live workers at which the run continues."""
        return 1

    def most_stale(self, workers: int) -> int | None:
        """Largest staleness of a gradient, in updates of the server; None if there is no bound."""
        return 0 if self.delivery == "synchronous" else None

    @abstractmethod
    def full_step(self, workers: int) -> int:
        """Number of gradients c that make a full step; each gradient counts as 1/c, however many are applied
        together.
        """

    def check(self, workers: int) -> None:
        """Check that the rule is valid for the given number of workers.

        Raises:
            ConfigurationError: the rule cannot work with `workers` workers.
        """

    @abstractmethod
    def admitted(self, reads: Sequence[Read], view: ConsistencyView) -> list[Read]:
        """Return the reads that the server answers now.

        Args:
            reads: the waiting reads, in order of arrival.
            view: the state of the server.
        """

    @abstractmethod
    def released(self, pending: Sequence[Push], view: ConsistencyView) -> list[list[Push]]:
        """Return the groups of gradients to apply now, in order.

        A group of m gradients makes m / full_step of a step along its mean.

        Args:
            pending: the gradients that have been received but not applied, in order of arrival.
            view: the state of the server.
        """

    def dropped(self, pending: Sequence[Push], view: ConsistencyView) -> list[Push]:
        """Return the pending gradients that will never be applied."""
        return []

    def flushed(self, pending: Sequence[Push], view: ConsistencyView) -> list[list[Push]]:
        """Return the groups of remaining gradients to apply after all workers have left."""
        return []


class ClockRule(Consistency):
    """A rule that depends only on the clocks: a read at clock c is admitted if c - `bound` <= the slowest clock, and a
    gradient with timestamp t is applied once t - `bound` + 1 <= the slowest clock.

    As long as the slowest clock does not change, the decision on older pending entries does not change either, so only
    the newest entry is examined.
    """

    @property
    @abstractmethod
    def bound(self) -> float:
        """Number of clocks by which a worker that reads may be ahead of the slowest live worker."""

    def admitted(self, reads: Sequence[Read], view: ConsistencyView) -> list[Read]:
        last = view.slowest + self.bound
        return [read for read in (reads if view.moved else reads[-1:]) if read.clock <= last]

    def released(self, pending: Sequence[Push], view: ConsistencyView) -> list[list[Push]]:
        return by_timestamp(pending if view.moved else pending[-1:], view.slowest + self.bound)


def by_timestamp(pushes: Sequence[Push], before: float = math.inf) -> list[list[Push]]:
    """Group the pushes of timestamps below `before` by timestamp, oldest first, each group in order of rank."""
    groups: dict[int, list[Push]] = {}
    for push in sorted(pushes, key=attrgetter("timestamp", "rank")):
        if push.timestamp < before:
            groups.setdefault(push.timestamp, []).append(push)
    return list(groups.values())
