"""The event queue of virtual time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

from flockstep.errors import RunError

E = TypeVar("E")
_NEVER = float("inf")


class EventQueue(Generic[E]):
    """Events in order of time; events of equal time in the order in which they were scheduled.

    `now` is the time of the last event that was removed, in virtual seconds; only `pop` and `run` advance `now`. Events
    are never compared with each other, so they may be of any type.
    """

    __slots__ = ("_count", "_heap", "now")

    def __init__(self, start: float = 0.0) -> None:
        self.now = start
        self._heap: list[tuple[float, int, E]] = []
        self._count = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def __bool__(self) -> bool:
        return bool(self._heap)

    def schedule(self, time: float, event: E) -> None:
        """Schedule `event` at `time`, which may be the current time.

        Raises:
            RunError: `time` is in the past, infinite or not a number.
        """
        if not self.now <= time < _NEVER:
            raise RunError(
                f"the time of an event must be finite and >= the current time ({self.now}), got {time}; schedule "
                "the event at the current time"
            )
        heapq.heappush(self._heap, (time, next(self._count), event))

    def run(self: EventQueue[Callable[[], None]]) -> None:
        """Call every event in order of time, including events that are scheduled by earlier events."""
        heap, take = self._heap, heapq.heappop
        while heap:
            self.now, _, event = take(heap)
            event()

    def pop(self) -> tuple[float, E]:
        """Remove the next event, advance `now` to its time, and return the time and the event.

        Raises:
            IndexError: the queue is empty.
        """
        time, _, event = heapq.heappop(self._heap)
        self.now = time
        return time, event
