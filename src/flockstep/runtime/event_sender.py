"""Sends a node's events to the supervisor, which writes them to the run's folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.errors import ProtocolError
from flockstep.records.events import HELD_BACK, Event

PERIOD = 0.02
"""Seconds since the last message after which the end of a step sends all buffered events. A process that is killed
loses at most the steps of its last 0.02 s, and none if its steps take longer.
"""
MOST = 128
"""Maximum number of events in one message, so that the message stays far below every limit on the size of messages."""
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Event])


class Teller(Protocol):
    """A connection to the supervisor, over which events are sent."""

    def tell(self, tag: str, array: FlatArray | None = None) -> None:
        """Queue a message for the supervisor."""


class EventSender:
    """Sends events in batches: steps, updates and spans wait for up to `PERIOD` seconds, all other events are sent at
    once.
    """

    def __init__(self, member: Teller, now: Callable[[], float] = time.monotonic):
        self._member = member
        self._now = now
        self._held: list[Event] = []
        self._sent = now()

    def write(self, event: Event) -> None:
        """Add an event to the buffer, and send the buffer if it must not wait longer."""
        self._held.append(event)
        if not isinstance(event, HELD_BACK) or len(self._held) >= MOST or self._now() - self._sent >= PERIOD:
            self.flush()

    def flush(self) -> None:
        """Send the buffered events to the supervisor now."""
        self._sent = self._now()
        if self._held:
            held, self._held = self._held, []
            self._member.tell("events", np.frombuffer(_encoder.encode(held), np.uint8))


def events_in(payload: FlatArray) -> list[Event]:
    """Decode the events that a node has sent.

    Raises:
        ProtocolError: the bytes are not events.
    """
    try:
        return _decoder.decode(payload.data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the events of this process cannot be read: {error}") from None
