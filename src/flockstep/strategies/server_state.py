"""What the programs of a parameter server remember."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flockstep.arrays.schema import FlatArray
from flockstep.messages import Message
from flockstep.strategies.consistency import Push


@dataclass
class PushState:
    """What a worker remembers: the versions it read, and per shard what its codec dropped."""

    versions: list[int]
    errors: list[FlatArray | None]


@dataclass
class ServerState:
    """What a server remembers: how often each live worker pushed, and what waits for its turn."""

    clocks: dict[int, int]
    slowest: int = 0
    """The least of the clocks."""
    rule: Any = None
    """What the update rule remembers."""
    pushes: list[Push] = field(default_factory=list)
    reads: list[Message] = field(default_factory=list)

    def advance(self, rank: int, clock: int | None) -> bool:
        """Set a worker's clock (None takes a dead worker out); return whether the slowest clock has moved."""
        before, slowest = self.clocks.pop(rank, None), self.slowest
        if clock is not None:
            self.clocks[rank] = clock
        if before == self.slowest:
            self.slowest = min(self.clocks.values(), default=self.slowest)
        return self.slowest != slowest
