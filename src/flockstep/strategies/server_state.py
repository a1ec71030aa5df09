"""What the programs of a parameter server remember, and what waits at its servers."""

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
    """A gradient that a server has received and not applied."""

    rank: int
    timestamp: int
    version: int
    """The server's version that it was computed on."""
    lr: float
    gradient: FlatArray


class Read(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A worker that waits for parameters."""

    rank: int
    clock: int
    version: int
    """The version that it has."""
    message: Message


@dataclass
class PushState:
    """What a worker remembers, per shard: the version it read, what its codec dropped, and of eager servers more."""

    versions: list[int]
    errors: list[FlatArray | None]
    outboxes: list[Outbox]
    """What filters withhold, and the lists of keys that each shard knows."""
    clocks: list[int] = field(default_factory=list)
    """The slowest clock that each shard's copy knows of (where it keeps copies)."""
    own: list[tuple[int, FlatArray]] = field(default_factory=list)
    """This worker's own steps, by timestamp, that the copies may not hold yet (where it keeps copies)."""


@dataclass
class ServerState:
    """What a server remembers: how often each live worker pushed, what waits, and who computes on what."""

    clocks: dict[int, int]
    slowest: int = 0
    """The least of the clocks."""
    behind: int = 0
    """How many clocks have stood at `slowest` since they were last counted; they are counted where none is left."""
    rule: Any = None
    """What the update rule remembers."""
    pushes: list[Push] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    reading: dict[int, int] = field(default_factory=dict)
    """Live worker that computes → the version that it computes on."""
    done: set[int] = field(default_factory=set)
    """Workers that have left because they had no more to do; their clocks still count."""
    inboxes: dict[int, Inbox] = field(default_factory=dict)
    """The lists of keys of each worker whose pushes are filtered."""
    kept: dict[int, FlatArray] = field(default_factory=dict)
    """Old versions, where the consistency rule keeps them."""
    told: dict[int, int] = field(default_factory=dict)
    """Worker → the newest version sent to it, where servers send new versions to those that are late."""

    def advance(self, rank: int, clock: int | None) -> bool:
        """Set a worker's clock (None takes it out); return whether the slowest clock has moved."""
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

    def depart(self, rank: int, lost: bool) -> bool:
        """A worker has left. Returns whether the slowest clock has moved.

        Where it died, its clock no longer counts; nor where it has left before, and others must do without it now.
        """
        self.reads = [read for read in self.reads if read.rank != rank]
        if lost:
            self.done.discard(rank)
            return self.advance(rank, None)
        self.reading.pop(rank, None)
        self.done.add(rank)
        return False

    def reopen(self, version: int, departed: Collection[int]) -> None:
        """Whoever had come to an end and is here again goes on, with the parameters of `version`: a run continues."""
        back = self.done - set(departed)
        self.reading.update(dict.fromkeys(back, version))
        self.done -= back
        for rank in back:
            self.told.pop(rank, None)


def without(waiting: list[P], gone: Sequence[P]) -> list[P]:
    """What still waits of `waiting`, which `gone` is part of."""
    ended = set(gone)
    return [one for one in waiting if one not in ended] if len(gone) < len(waiting) else []
