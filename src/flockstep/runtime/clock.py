"""Computes the supervisor's time from a node's own clock, because all times of a run are measured by the supervisor's
clock.

Two hosts' clocks differ by an unknown offset. Each round trip of a message to the supervisor and back gives four
timestamps, which bound the offset to within half of the time that the messages were in transit; the round trip with the
shortest time in transit is used (David L. Mills, Internet Time Synchronization: the Network Time Protocol, 1991).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

ROUND_TRIPS = 5
"""Number of round trips at the start of a run; the fastest round trip determines the clock's offset."""


class RoundTrip(NamedTuple):
    """The four timestamps of a round trip, in seconds: `sent` and `received` on the node's clock, `heard` and
    `answered` on the supervisor's clock.
    """

    sent: float
    heard: float
    answered: float
    received: float

    @property
    def delay(self) -> float:
        """Seconds for which both messages together were in transit."""
        return (self.received - self.sent) - (self.answered - self.heard)


class ClockOffset(NamedTuple):
    """Difference between the supervisor's clock and a node's clock, and the largest error of this difference, both in
    seconds.
    """

    seconds: float
    uncertainty: float


def offset_of(trips: Iterable[RoundTrip]) -> ClockOffset:
    """Return the offset that follows from the round trip with the smallest delay; its error is at most half of this
    delay.
    """
    best = min(trips, key=lambda trip: trip.delay)
    offset = ((best.heard - best.sent) + (best.answered - best.received)) / 2
    return ClockOffset(offset, best.delay / 2)
