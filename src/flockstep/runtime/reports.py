"""What a node sends the supervisor for the record: its events, and snapshots of its parameters."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import msgspec
import numpy as np

from flockstep.arrays.kernels import name_of
from flockstep.arrays.namespace import to_host
from flockstep.arrays.schema import FlatArray
from flockstep.errors import FlockstepError, ProtocolError
from flockstep.messages import Fields
from flockstep.nodes import Node, Worker
from flockstep.records.events import HELD_BACK, Event
from flockstep.records.snapshots import LAST
from flockstep.runtime.member import Member
from flockstep.runtime.tracker import FINAL

PERIOD = 0.02
"""Seconds since the last message after which the end of a step sends all buffered events. A process that is killed
loses at most the steps of its last 0.02 s, and none if its steps take longer.
"""
MOST_EVENTS = 128
"""Maximum number of events in one message, so that the message stays far below every limit on the size of messages."""
NEWEST_FIRST = 1.0
"""Seconds until a node's first snapshot between evaluations; longer for large models (see `NEWEST_SHARE`)."""
USUAL_RATE = 1e9
"""Assumed bytes per second at which a snapshot is sent, until the first snapshot has been measured."""
NEWEST_PERIOD = 5.0
"""Seconds between two snapshots that are sent between evaluations; longer if sending is slow (see `NEWEST_SHARE`)."""
NEWEST_SHARE = 50
"""Minimum ratio of the time between two snapshots to the time that it takes to send a snapshot, so that a node spends
at most 2 % of its time on sending.
"""
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Event])


class EventSender:
    """Sends events in batches: steps, updates and spans wait for up to `PERIOD` seconds, all other events are sent at
    once.
    """

    def __init__(self, member: Member, now: Callable[[], float] = time.monotonic):
        self._member = member
        self._now = now
        self._held: list[Event] = []
        self._sent = now()

    def write(self, event: Event) -> None:
        """Add an event to the buffer, and send the buffer if it must not wait longer."""
        self._held.append(event)
        if not isinstance(event, HELD_BACK) or len(self._held) >= MOST_EVENTS or self._now() - self._sent >= PERIOD:
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


class SnapshotSender:
    """Sends snapshots of a node's parameters to the supervisor, which evaluates them."""

    def __init__(self, member: Member, alike: bool = False):
        """`alike`: all replicas are equal, so that only the worker of the lowest rank sends the newest one."""
        self._alike = alike
        self.buffers: Callable[[], FlatArray] = lambda: np.empty(0)
        self._member = member
        self._due: float | None = None
        self._closed = False

    def send_snapshot(self, node: Node, tick: float, t: float, sent: int, params: FlatArray | None = None) -> None:
        """Send a snapshot of `params` (default: the node's current parameters) to the supervisor."""
        params = node.params if params is None else params
        buffers = self.buffers()
        self._closed = tick == FINAL
        note: Fields = {"tick": tick, "seconds": t, "step": node.run_step, "sent_bytes": sent}
        size: Fields = {"size": len(params), "dtype": name_of(params), "buffers": buffers.nbytes}
        self._member.send_in_parts({**note, **size}, [to_host(params), buffers])
        if self._closed:
            self._member.tell("done", None, {"step": node.run_step})

    def newest(self, node: Node, now: Callable[[], float], sent: int) -> None:
        """Send a snapshot if the previous one is old enough, so that a recent model exists if the run ends early."""
        if self._alike and isinstance(node, Worker) and node.rank != node.view.ranks[0]:
            return
        if self._due is None:
            self._due = max(NEWEST_FIRST, NEWEST_SHARE * node.params.nbytes / USUAL_RATE)
        if (began := now()) >= self._due:
            self.send_snapshot(node, LAST, began, sent)
            self._due = now() + max(NEWEST_PERIOD, NEWEST_SHARE * (now() - began))

    def salvage(self, node: Node, t: float, sent: int) -> None:
        """Send the current parameters of a failing run, if they are finite."""
        with contextlib.suppress(FlockstepError, RuntimeError, MemoryError):  # a GPU that has failed returns nothing
            if not self._closed and np.isfinite(to_host(node.params)).all():
                self.send_snapshot(node, LAST, t, sent)
