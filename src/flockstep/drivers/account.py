"""A node's books: what it sent, received and spent its time on, written to the record as it happens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.messages import Address, Message
from flockstep.records.events import Event, Figure, Node, Span, Step, Update

Emit = Callable[[Event], None]
SPAN_STEPS = 8
"""The timeline shows the first steps only,"""
SPAN_NODES = 16
"""of the first workers only, and all servers,"""
SPANS = 100
"""and so many spans of each at the most: a server has no steps."""


class Account:
    """The books of one node: running totals, and what they were at the last step. Times in seconds."""

    def __init__(self, address: Address, emit: Emit):
        self.address = address
        self.emit = emit
        self.steps = 0
        self.waited = 0.0
        """Seconds of the time since the last entry that this node slept for others, in memory that they share."""
        self.seconds = {"compute": 0.0, "wait": 0.0, "comm": 0.0}
        self.sent_bytes = 0
        self.received_bytes = 0
        self.messages_sent = 0
        self.messages_received = 0
        self.header_bytes = 0
        self.estimated_bytes = 0
        """Those of `sent_bytes` that are known by a formula only, since others moved them."""
        self._spans = 0
        self._at_last_step = self._totals()

    def sent(self, message: Message, header_bytes: int) -> None:
        """Count a message handed to the transport."""
        self.sent_bytes += message.payload_bytes
        self.messages_sent += 1
        self.header_bytes += header_bytes

    def received(self, message: Message) -> None:
        """Count a message that arrived."""
        self.received_bytes += message.payload_bytes
        self.messages_received += 1

    def moved(self, sent: int, received: int, messages: int) -> None:
        """Count bytes of payload that went another way than by messages, as so many messages each way."""
        self.sent_bytes += sent
        self.received_bytes += received
        self.messages_sent += messages
        self.messages_received += messages

    def spent(self, kind: str, start: float, end: float) -> None:
        """Count time spent on compute, wait or comm."""
        if end <= start:
            return
        self.seconds[kind] += end - start
        if self.steps < SPAN_STEPS and self.address < SPAN_NODES and self._spans < SPANS:
            self._spans += 1
            self.emit(Span(self.address, kind, start, end))

    def step(self, t: float, loss: float | None) -> None:
        """Close the books of a worker's step."""
        self.steps += 1
        before, now = self._at_last_step, self._totals()
        self._at_last_step = now
        self.emit(
            Step(
                t,
                self.address,
                self.steps,
                loss,
                now[0] - before[0],
                now[1] - before[1],
                now[2] - before[2],
                now[3] - before[3],
                now[4] - before[4],
                now[5] - before[5],
                now[6] - before[6],
            )
        )

    def updates(
        self, t: float, source: Address | None, count: int, staleness: int | None, weight: float | None = None
    ) -> None:
        """Note updates that took effect here."""
        self.emit(Update(t, self.address, source, count, staleness, weight))

    def figure(self, t: float, name: str, value: float) -> None:
        """Note a figure of the strategy's own."""
        self.emit(Figure(t, self.address, name, value))

    def close(self, t: float, params: FlatArray) -> None:
        """Write the node's totals."""
        totals = self._totals()
        if self.estimated_bytes:
            self.figure(t, "bytes_by_formula", self.estimated_bytes)
        self.emit(Node(self.address, t, self.steps, *totals, self.header_bytes, fingerprint(params)))

    def _totals(self) -> tuple[float, float, float, int, int, int, int]:
        seconds = self.seconds
        return (
            seconds["compute"],
            seconds["wait"],
            seconds["comm"],
            self.sent_bytes,
            self.received_bytes,
            self.messages_sent,
            self.messages_received,
        )


def fingerprint(params: FlatArray) -> str:
    """16 hexadecimal digits that two arrays share only if all their bits are equal."""
    return hashlib.sha256(np.ascontiguousarray(params).view(np.uint8).data).hexdigest()[:16]
