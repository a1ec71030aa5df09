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
    """Number of gradients that the slowest live worker has pushed."""
    workers: int
    """Number of workers at the start of the run (lambda, P or n in the literature)."""
    live: int
    """Number of workers that have neither died nor finished."""
    lost: int
    """Number of workers that died."""
    version: int
    """Number of updates that the server has applied so far."""
    reading: Mapping[int, int]
    """Rank of each live worker that is computing → version of the parameters with which the worker computes."""
    params: FlatArray
    """The server's current parameters, of shape (K,)."""
    kept: dict[int, FlatArray]
    """Version → parameters (K,), for the old versions of which the consistency rule keeps copies."""
    moved: bool
    """Whether the smallest clock has advanced, or a worker has left, since the rule was last evaluated. A worker's
    clock is the number of gradients that the worker has pushed.
    """
    waiting: Callable[[int], bool]
    """Function that returns whether the worker of the given rank has pushed a gradient that is neither applied nor
    dropped yet.
    """


class Consistency(Component):
    """The interface of a consistency rule, which decides which pending reads a parameter server admits and which
    pending gradients the server applies.
    """

    noun: ClassVar[str] = "consistency"

    @property
    def access(self) -> Access:
        """The access mode with which workers obtain parameters from the servers."""
        return PushPull()

    compares_versions: ClassVar[bool] = False
    """Whether the rule depends on old parameters, so that the server stores a copy of every version in
    `ConsistencyView.kept`. The rule deletes the copies that it no longer needs.
    """
    one_each: ClassVar[bool] = False
    """Whether every group of gradients that the rule releases is a whole step with at most one gradient of each
    worker.
    """

    @property
    def alone(self) -> bool:
        """Whether the server applies every gradient alone, never together with other gradients in one step."""
        return False

    @property
    def gathers(self) -> int:
        """Number of gradients of different workers that a step waits for: 0 for all of them or none, -b for all but
        b.
        """
        return 0

    @property
    @abstractmethod
    def delivery(self) -> Delivery:
        """The delivery guarantee of the gradients, a value of `Traits.delivery`; "partial" if gradients are dropped."""

    @property
    @abstractmethod
    def survives(self) -> bool | int:
        """Number of worker deaths after which the other workers still continue; False for none, True for any number."""

    @property
    def least(self) -> int:
        """Minimum number of live workers at which the run continues."""
        return 1

    def most_stale(self, workers: int) -> int | None:
        """Largest staleness of a gradient, counted in updates of the server; None if staleness has no bound."""
        return 0 if self.delivery == "synchronous" else None

    @abstractmethod
    def full_step(self, workers: int) -> int:
        """Number of gradients c that make a full step of the optimizer. Each gradient counts as 1/c of a step, however
        many gradients are applied together.
        """

    def check(self, workers: int) -> None:
        """Check that the rule is valid for the given number of workers.

        Raises:
            ConfigurationError: the rule cannot work with `workers` workers.
        """

    @abstractmethod
    def admitted(self, reads: Sequence[Read], view: ConsistencyView) -> list[Read]:
        """Return the read requests that the server answers now.

        Args:
            reads: the waiting read requests, in order of arrival.
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
        """Return the pending gradients that the server will never apply."""
        return []

    def flushed(self, pending: Sequence[Push], view: ConsistencyView) -> list[list[Push]]:
        """Return the groups of remaining gradients to apply after all workers have left."""
        return []


class ClockRule(Consistency):
    """A consistency rule that depends only on the workers' clocks: a read at clock c is admitted if c - `bound` <= the
    slowest clock, and a gradient with timestamp t is applied once t - `bound` + 1 <= the slowest clock.

    As long as the slowest clock does not change, the decisions about older pending reads and gradients do not change
    either, so only the newest read or gradient is examined.
    """

    @property
    @abstractmethod
    def bound(self) -> float:
        """Number of clocks by which a worker that reads may be ahead of the slowest live worker. A worker's clock is
        the number of its pushes.
        """

    @property
    def delivery(self) -> Delivery:
        """The delivery guarantee of the gradients: `synchronous` if the bound is 0, otherwise `bounded delay`."""
        return "bounded delay" if self.bound else "synchronous"

    @property
    def survives(self) -> bool:
        """Whether the other workers continue after a worker's death: True if the bound is above 0, because a dead
        worker's clock no longer counts.
        """
        return self.bound > 0

    def admitted(self, reads: Sequence[Read], view: ConsistencyView) -> list[Read]:
        last = view.slowest + self.bound
        return [read for read in (reads if view.moved else reads[-1:]) if read.clock <= last]

    def released(self, pending: Sequence[Push], view: ConsistencyView) -> list[list[Push]]:
        return by_timestamp(pending if view.moved else pending[-1:], view.slowest + self.bound)


def by_timestamp(pushes: Sequence[Push], before: float = math.inf) -> list[list[Push]]:
    """Group the pushes whose timestamps are below `before` by timestamp, oldest first, with each group in order of
    rank.
    """
    groups: dict[int, list[Push]] = {}
    ready = [push for push in pushes if push.timestamp < before]
    for push in sorted(ready, key=attrgetter("timestamp", "rank")):
        groups.setdefault(push.timestamp, []).append(push)
    return list(groups.values())
