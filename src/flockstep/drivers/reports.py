"""A node's events of the record on their way to the supervisor, which writes them where the run's folder is."""

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
"""Seconds: a step that ends later than this after the last message sends all that is held back. So a process that is
killed loses at most what it did in its last 0.02 s of steps, and nothing where a step takes longer than that."""
MOST = 128
"""Events that one message holds: far below the smallest limit of a message."""
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Event])


class Teller(Protocol):
    """Says something to the supervisor."""

    def tell(self, tag: str, array: FlatArray | None = None) -> None:
        """Queue a message."""


class Reports:
    """Sends events in batches; steps, updates and spans wait for up to `PERIOD`, everything else goes at once."""

    def __init__(self, member: Teller, now: Callable[[], float] = time.monotonic):
        self._member = member
        self._now = now
        self._held: list[Event] = []
        self._sent = now()

    def write(self, event: Event) -> None:
        """Add an event."""
        self._held.append(event)
        if not isinstance(event, HELD_BACK) or len(self._held) >= MOST or self._now() - self._sent >= PERIOD:
            self.flush()

    def flush(self) -> None:
        """Send what is held back."""
        self._sent = self._now()
        if self._held:
            held, self._held = self._held, []
            self._member.tell("events", np.frombuffer(_encoder.encode(held), np.uint8))


def events_in(payload: FlatArray) -> list[Event]:
    """The events that a node has sent.

    Raises:
        ProtocolError: the bytes are not events.
    """
    try:
        return _decoder.decode(payload.data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"its events cannot be read: {error}") from None
