"""Metrics of a node, written to the record as events: bytes and messages sent and received, and how the time was
spent.
"""

from __future__ import annotations

import dataclasses
import hashlib
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from flockstep.arrays.namespace import DEVICE_COPIES, to_host
from flockstep.arrays.schema import FlatArray
from flockstep.links.bus import Traffic
from flockstep.messages import Address
from flockstep.records.events import Event, NodeEvent, RefusedEvent, ScalarEvent, SpanEvent, StepEvent, UpdateEvent

Emit = Callable[[Event], None]
SPAN_STEPS = 8
"""Number of first steps of a worker for which spans are recorded, for the timeline."""
SPAN_NODES = 16
"""Number of workers, the first by rank, for which spans are recorded; servers always record spans."""
SPANS = 100
"""Largest number of spans of one node, needed for servers, which have no steps that would limit them."""


class NodeMetrics:
    """Metrics of one node: running totals, and the totals at the last step. Times are in seconds."""

    def __init__(self, address: Address, emit: Emit | None, traffic: Traffic | None = None):
        """`traffic`: the bus's own counters, if the node has a process of its own; without `emit`, no events are
        recorded.
        """
        self.address = address
        self.emit = emit
        self.traffic = traffic or Traffic()
        self.backup_of: Address | None = None
        """The server of which this process is a backup; None for all other nodes."""
        self.steps = 0
        self.waited = 0.0
        """Seconds since the last entry in which this node waited for others in shared memory."""
        self.seconds = {"compute": 0.0, "wait": 0.0, "comm": 0.0}
        self.estimated_bytes = 0
        """Part of `traffic.sent_bytes` that is computed by a formula, because another library moved the bytes."""
        self._spans = 0 if emit is not None and address < SPAN_NODES else SPANS
        self._copies = None if traffic is None else DEVICE_COPIES.nbytes
        """Bytes copied between device and host until the last step, by the process of this node; None: not counted."""
        self._at_last_step = self._totals()

    def spent(self, kind: str, start: float, end: float) -> None:
        """Count time that the node spent on `kind`, which is compute, wait or comm."""
        if end <= start:
            return
        self.seconds[kind] += end - start
        if self._spans < SPANS and self.steps < SPAN_STEPS and self.emit is not None:
            self._spans += 1
            self.emit(SpanEvent(self.address, kind, start, end))

    def waited_for(self, start: float, sent: float, end: float) -> None:
        """Count the time spent waiting for a message: as `wait` until the message was sent, then as `comm` until it
        arrived.
        """
        if sent < start:
            sent = start
        if self._spans < SPANS and self.steps < SPAN_STEPS:
            self.spent("wait", start, sent)
            self.spent("comm", sent, end)
        else:
            self.seconds["wait"] += sent - start
            self.seconds["comm"] += end - sent

    def step(self, t: float, loss: float | None) -> None:
        """Write the event of a worker's step."""
        self.steps += 1
        if self.emit is None:
            return
        if self._copies is not None and self._copies != DEVICE_COPIES.nbytes:
            self._copies = DEVICE_COPIES.nbytes
            self.scalar(t, "device_bytes", self._copies)
        before, self._at_last_step = self._at_last_step, self._totals()
        self.emit(StepEvent(t, self.address, self.steps, loss, *map(operator.sub, self._at_last_step, before)))

    def updates(
        self, t: float, source: Address | None, count: int, staleness: int | None, weight: float | None = None
    ) -> None:
        """Record updates that took effect on this node."""
        if self.emit is not None:
            self.emit(UpdateEvent(t, self.address, source, count, staleness, weight))

    def refused(self, t: float, source: Address, reason: str) -> None:
        """Record that a gradient of worker `source` was refused."""
        if self.emit is not None:
            self.emit(RefusedEvent(t, self.address, source, reason))

    def scalar(self, t: float, name: str, value: float) -> None:
        """Record a named number that the strategy reports."""
        if self.emit is not None:
            self.emit(ScalarEvent(t, self.address, name, value))

    def close(self, t: float, params: FlatArray) -> None:
        """Write the node's totals to the record at the end of the run."""
        if self.emit is None:
            return
        totals = self._totals()
        if self.estimated_bytes:
            self.scalar(t, "bytes_by_formula", self.estimated_bytes)
        if self.traffic.rejected:
            self.scalar(t, "rejected_connections", self.traffic.rejected)
        counts = *totals, self.traffic.header_bytes
        self.emit(NodeEvent(self.address, t, self.steps, *counts, fingerprint(params), self.backup_of))

    def kept(self) -> dict[str, int | float | list[int | float]]:
        """Return the totals so far, for a checkpoint; `restore` sets them again."""
        return {
            **self.seconds,
            **dataclasses.asdict(self.traffic),
            "steps": self.steps,
            "estimated_bytes": self.estimated_bytes,
            "spans": self._spans,
            "at_last_step": list(self._at_last_step),
        }

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Set the totals to those that `kept` returned."""
        self.seconds = {kind: kept[kind] for kind in self.seconds}
        for field in dataclasses.fields(self.traffic):
            setattr(self.traffic, field.name, kept[field.name])
        self.steps, self.estimated_bytes, self._spans = kept["steps"], kept["estimated_bytes"], kept["spans"]
        self._at_last_step = tuple(kept["at_last_step"])

    def _totals(self) -> tuple[float, float, float, int, int, int, int]:
        compute, wait, comm = self.seconds.values()
        traffic = self.traffic
        return (
            compute,
            wait,
            comm,
            traffic.sent_bytes,
            traffic.received_bytes,
            traffic.messages_sent,
            traffic.messages_received,
        )


def fingerprint(params: FlatArray) -> str:
    """16 hexadecimal digits of the array's SHA-256, equal for two arrays only if all their bits are equal."""
    return hashlib.sha256(np.ascontiguousarray(to_host(params)).view(np.uint8).data).hexdigest()[:16]
