"""Collects what the nodes of a run send for its record: events, flight recorders, snapshots and final parameters."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.errors import Interrupted, ProtocolError, RunError
from flockstep.launchers.evaluation import SnapshotHandler
from flockstep.launchers.peers import Outcome, ProcessLink, RunPeers
from flockstep.messages import Address, Message
from flockstep.records.access import open_file
from flockstep.records.events import Event, LostEvent, NodeEvent, StepEvent
from flockstep.records.flight import FlightEvent, FlightRecorder, append, decoded
from flockstep.records.folder import EventWriter, RunFolder
from flockstep.records.snapshots import LAST, SNAPSHOTS, SnapshotWriter
from flockstep.records.tape import TAPES, tape_file
from flockstep.runtime.node_metrics import fingerprint
from flockstep.runtime.part_group import groups_of
from flockstep.runtime.replication import ProgramEvents
from flockstep.runtime.reports import MOST_EVENTS, events_in
from flockstep.runtime.snapshot_tracker import NewestSnapshots
from flockstep.runtime.tracker import FINAL


class Collection:
    """What the nodes of a run have sent: written to the run's folder, passed to the evaluation, and summed up in the
    outcome.
    """

    def __init__(
        self,
        peers: RunPeers,
        outcome: Outcome,
        record: Path,
        returns: bool = False,
        evaluation: SnapshotHandler | None = None,
        show: Callable[[RunPeers], None] = lambda peers: None,
    ):
        """`record`: the run's folder. `returns`: whether the nodes receive the model that is the result. `show` is
        called from time to time with the state of every process.
        """
        self.outcome, self.evaluation = outcome, evaluation or SnapshotHandler()
        self.hashes: dict[Address, str] = {}
        """Fingerprint of the final parameters of each node."""
        self.flight = FlightRecorder()
        """What the launcher itself did last."""
        self.record = record
        self._peers, self._snapshots, self._returns, self._show = peers, record / SNAPSHOTS, returns, show
        self._once = ProgramEvents(peers.cluster)
        self._writers: dict[Address, EventWriter] = {}
        self._arriving: dict[Address, SnapshotWriter] = {}

    def begin(self, files: ExitStack) -> None:
        """Open the files of all nodes' events, which `files` closes, because the run begins."""
        self._once = ProgramEvents(self._peers.cluster)
        for node in self._peers.links:
            file = RunFolder(self.record).node_events_file(node)
            self._writers[node] = files.enter_context(EventWriter(file, MOST_EVENTS))
            self.outcome.nodes.add(node)

    def take(self, message: Message, link: ProcessLink) -> bool:
        """Keep what a node sends; return whether it is a step of a worker.

        Raises:
            ProtocolError: the node sends events, and the run has not begun.
        """
        match message.tag:
            case "events":
                return self._write(message.source, events_in(message.payload)) and message.source >= 0
            case "tape":
                segment = self.record / TAPES / str(int(message.note["segment"]))
                with open_file(tape_file(segment, message.source), "ab") as file:
                    file.write(message.payload.data)
            case "flight":
                self._append(message.source, decoded(message.payload.data))
            case "snapshot":
                with self._warned(float(message.note["tick"])):
                    node = self._peers.cluster.logical(message.source)
                    writer = SnapshotWriter(self._snapshots, node, message.note, link.hello.largest)
                    self._arriving[message.source] = writer
                    self._add(message.source, np.empty(0, np.uint8))
            case "part":
                link.tell("taken")
                self._add(message.source, message.payload)
        return False

    def _write(self, address: Address, events: list[Event]) -> bool:
        """Write a node's events to the record; return whether a step is among them."""
        writer, stepped = self._writers.get(address), False
        if writer is None:
            raise ProtocolError("the process sent events before the run began")
        for reported in events:
            stepped |= isinstance(reported, StepEvent)
            if (event := self._once.once(address, reported)) is None:
                continue
            writer.write(event)
            if isinstance(event, StepEvent):
                one = self._peers[address]
                one.step, one.loss = event.step, one.loss if event.loss is None else event.loss
            elif isinstance(event, NodeEvent):
                self.hashes[address] = event.hash
        writer.flush()
        return stepped

    def _append(self, address: Address | None, events: list[FlightEvent]) -> None:
        """Append the events of a flight recorder to its file; None stands for the launcher's flight recorder."""
        if self._peers.went is None or isinstance(self.outcome.error, Interrupted):  # an interruption is no fault
            return
        try:
            append(self.record, address, events)
        except OSError as error:
            self.outcome.warn(f"the flight recorder was not written: {error.strerror}")

    def keep_own_flight(self) -> None:
        """Append the launcher's flight recorder to its file, because of a fault."""
        went = self._peers.went or 0.0
        self._append(None, self.flight.taken(lambda seconds: seconds - went))

    def _add(self, address: Address, part: FlatArray) -> None:
        """Store a part of a node's snapshot; drop the snapshot if the part cannot be written to any folder."""
        if (arriving := self._arriving.pop(address, None)) is None:
            return
        with self._warned(arriving.tick):
            if (item := arriving.add(part)) is None:
                self._arriving[address] = arriving
                return
            if item.tick is None or item.tick == LAST:
                self.outcome.newest.take(item)
            self.evaluation.take(item)

    @contextlib.contextmanager
    def _warned(self, tick: float) -> Iterator[None]:
        """Turn an error of storing a snapshot into a warning; only final parameters must be stored."""
        try:
            yield
        except RunError as error:
            if tick == FINAL:
                raise
            self.outcome.warn(str(error))

    def lose(self, address: Address, reason: str) -> None:
        """Note the loss of a node, and drop its incomplete snapshot."""
        since = time.monotonic() - self._peers.went if self._peers.went is not None else 0.0
        self.outcome.lost[address] = LostEvent(since, address, reason)
        if (arriving := self._arriving.pop(address, None)) is not None:
            arriving.drop()

    def dismiss(self) -> None:
        """Tell all nodes that the run has ended. Scripts get the model that is the result, unless theirs has the same
        fingerprint, with the workers' final buffers.
        """
        outcome = self.outcome
        newest = outcome.newest_model() if self._returns else None
        groups = [] if newest is None else groups_of(outcome.sizes or (len(newest[1]),), 0)
        results = [newest[1][group.span] for group in groups if newest is not None]
        known, buffers = list(map(fingerprint, results)), [outcome.newest.buffers(group.part) for group in groups]
        for address, link in self._peers.links.items():
            if address < 0 or not results:
                link.dismiss(None, {})
                continue
            part = address % len(results)
            link.dismiss(None if self.hashes.get(address) == known[part] else results[part], buffers[part])

    def show(self) -> None:
        """Show the state of every process."""
        self._show(self._peers)

    def forget(self) -> None:
        """Remove the snapshots that the nodes have sent so far."""
        self.outcome.newest = NewestSnapshots()
        shutil.rmtree(self._snapshots, ignore_errors=True)
