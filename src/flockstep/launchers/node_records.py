"""Writes the parts of a record that the nodes of a run send: events, flight recorders and snapshots."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.errors import Interrupted, ProtocolError, RunError
from flockstep.launchers.evaluation import SnapshotHandler
from flockstep.launchers.peers import Outcome, RunPeers
from flockstep.messages import Address, Fields
from flockstep.nodes import Cluster
from flockstep.records.events import Event, NodeEvent, StepEvent
from flockstep.records.flight import FlightEvent, FlightRecorder, append
from flockstep.records.folder import EventWriter, RunFolder
from flockstep.records.snapshots import LAST, SNAPSHOTS, SnapshotWriter
from flockstep.runtime.replication import ProgramEvents
from flockstep.runtime.reports import MOST_EVENTS
from flockstep.runtime.tracker import FINAL


class NodeRecords:
    """Writes what the nodes of a run send to the run's folder, and passes their snapshots to the evaluation."""

    def __init__(self, peers: RunPeers, outcome: Outcome, record: Path, evaluation: SnapshotHandler):
        """`record`: the run's folder."""
        self.program_events = ProgramEvents(Cluster(0))
        """Tells which events of a server's processes belong to the record."""
        self.snapshots = record / SNAPSHOTS
        self.hashes: dict[Address, str] = {}
        """Fingerprint of the final parameters of each node."""
        self.flight = FlightRecorder()
        """What the launcher itself did last."""
        self._peers, self._outcome, self._record, self._evaluation = peers, outcome, record, evaluation
        self._writers: dict[Address, EventWriter] = {}
        self._arriving: dict[Address, SnapshotWriter] = {}

    def begin(self, node: Address, files: contextlib.ExitStack) -> None:
        """Open the file of a node's events, which `files` closes."""
        file = RunFolder(self._record).node_events_file(node)
        self._writers[node] = files.enter_context(EventWriter(file, MOST_EVENTS))
        self._outcome.nodes.add(node)

    def write(self, address: Address, events: list[Event]) -> None:
        """Write a node's events to the record.

        Raises:
            ProtocolError: the run has not begun.
        """
        writer = self._writers.get(address)
        if writer is None:
            raise ProtocolError("the process sent events before the run began")
        for kept in events:
            if (event := self.program_events.once(address, kept)) is None:
                continue
            writer.write(event)
            if isinstance(event, StepEvent):
                one = self._peers[address]
                one.step, one.loss = event.step, one.loss if event.loss is None else event.loss
            elif isinstance(event, NodeEvent):
                self.hashes[address] = event.hash
        writer.flush()

    def keep_flight(self, address: Address | None, events: list[FlightEvent]) -> None:
        """Append the events of a node's flight recorder to the recorder's file; None stands for the launcher's flight
        recorder.
        """
        if self._peers.went is None or isinstance(self._outcome.error, Interrupted):  # an interruption is no fault
            return
        try:
            append(self._record, address, events)
        except OSError as error:
            self._outcome.warn(f"the flight recorder was not written: {error.strerror}")

    def keep_own_flight(self) -> None:
        """Append the launcher's flight recorder to its file, because of a fault."""
        went = self._peers.went or 0.0
        self.keep_flight(None, self.flight.taken(lambda seconds: seconds - went))

    def begin_snapshot(self, address: Address, node: Address, note: Fields, largest: int) -> None:
        """Begin to receive a snapshot of node `node`, of at most `largest` bytes."""
        with self._warned(float(note["tick"])):
            self._arriving[address] = SnapshotWriter(self.snapshots, node, note, largest)
            self.take(address, np.empty(0, np.uint8))

    def take(self, address: Address, part: FlatArray) -> None:
        """Store a part of a snapshot; drop the snapshot if the part cannot be written to any folder."""
        if (arriving := self._arriving.pop(address, None)) is None:
            return
        with self._warned(arriving.tick):
            if (item := arriving.add(part)) is None:
                self._arriving[address] = arriving
                return
            if item.tick is None or item.tick == LAST:
                self._outcome.newest.take(item)
            self._evaluation.take(item)

    def drop(self, address: Address) -> None:
        """Drop the incomplete snapshot of a lost node."""
        if (arriving := self._arriving.pop(address, None)) is not None:
            arriving.drop()

    @contextlib.contextmanager
    def _warned(self, tick: float) -> Iterator[None]:
        """Turn an error of storing a snapshot into a warning; only final parameters must be stored."""
        try:
            yield
        except RunError as error:
            if tick == FINAL:
                raise
            self._outcome.warn(str(error))
