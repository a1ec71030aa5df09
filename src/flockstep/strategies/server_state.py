"""The states of a parameter server's nodes, and the pushes and reads that wait at a server."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from flockstep.arrays.schema import FlatArray
from flockstep.messages import Message
from flockstep.strategies.filters.packet import Inbox, Outbox

P = TypeVar("P", "Push", "Read")


class Push(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A gradient that a server has received but not yet applied."""

    rank: int
    timestamp: int
    version: int
    """Version of the server's parameters with which the gradient was computed."""
    lr: float
    gradient: FlatArray


class Read(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A worker's request for parameters, which waits until the server admits it."""

    rank: int
    clock: int
    version: int
    """Version of the parameters that the worker has when it sends the request."""
    message: Message


@dataclass(slots=True)
class PushState:
    """A worker's state: for each shard, the version that the worker has read, the feedback memory and, if the worker
    keeps copies of the parameters, the clock of each copy.
    """

    versions: list[int]
    errors: list[FlatArray | None]
    outboxes: list[Outbox]
    """For each shard, the entries that filters have withheld, and the key lists that the shard remembers."""
    clocks: list[int] = field(default_factory=list)
    """For each shard, the number of steps whose gradients of all workers this worker's copy includes; used only if
    workers keep copies.
    """
    own: list[tuple[int, FlatArray]] = field(default_factory=list)
    """(timestamp, step (K,)) of this worker's own steps that its copies may not yet include; used only if workers keep
    copies.
    """


@dataclass(slots=True)
class ServerState:
    """A server's state: the clock of each live worker, the waiting pushes and reads, and the version with which each
    worker computes.
    """

    clocks: dict[int, int]
    slowest: int = 0
    """The smallest clock of the live workers. A worker's clock is the number of gradients that the worker has
    pushed.
    """
    behind: int = 0
    """Number of workers whose clocks still equal `slowest`. When the number reaches 0, `slowest` is computed again."""
    update_state: Any = None
    """The state of the server update, such as the state of its optimizer."""
    pushes: list[Push] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    reading: dict[int, int] = field(default_factory=dict)
    """Rank of each live worker that is computing → version of the parameters with which the worker computes."""
    done: set[int] = field(default_factory=set)
    """Ranks of the workers that have left after their last step; the clocks of these workers still count."""
    inboxes: dict[int, Inbox] = field(default_factory=dict)
    """Rank → key lists received from the worker of this rank, if pushes are filtered."""
    kept: dict[int, FlatArray] = field(default_factory=dict)
    """Version → old parameters (K,), if the consistency rule depends on old parameters."""
    newest_sent: dict[int, int] = field(default_factory=dict)
    """Rank → newest version sent to the worker; used only if servers send new versions to workers that compute with an
    older version.
    """
    combined: FlatArray | None = None
    """The previous result (K,) of the aggregation, if the next result depends on it."""

    def advance(self, rank: int, clock: int | None) -> bool:
        """Set a worker's clock, or remove the clock if `clock` is None; return whether the slowest clock has
        advanced.
        """
        before, slowest = self.clocks.pop(rank, None), self.slowest
        self.reading.pop(rank, None)
        if clock is not None:
            self.clocks[rank] = clock
        if before == slowest:
            self.behind -= 1
            if self.behind < 1:
                clocks = list(self.clocks.values())
                self.slowest = min(clocks, default=slowest)
                self.behind = clocks.count(self.slowest)
        return self.slowest != slowest

    def waits(self, rank: int) -> bool:
        """Return whether a gradient of worker `rank` waits."""
        return any(push.rank == rank for push in self.pushes)

    def depart(self, rank: int, lost: bool) -> bool:
        """Record that a worker has left; return whether the slowest clock has advanced.

        The clock of a worker that died no longer counts, even if the worker had left before.
        """
        self.reads = [read for read in self.reads if read.rank != rank]
        if lost:
            self.done.discard(rank)
            return self.advance(rank, None)
        self.reading.pop(rank, None)
        self.done.add(rank)
        return False

    def reopen(self, version: int, departed: Collection[int]) -> None:
        """Let the workers that had left compute again with the parameters of `version`, when a run continues."""
        back = self.done - set(departed)
        self.reading.update(dict.fromkeys(back, version))
        self.done -= back
        for rank in back:
            self.newest_sent.pop(rank, None)


def without(waiting: list[P], gone: Sequence[P]) -> list[P]:
    """Return the entries of `waiting` that are not in `gone`, in the same order."""
    if len(gone) == len(waiting):
        return []
    ended = set(gone)
    return [one for one in waiting if one not in ended]
