"""Evaluates model snapshots during training, in a separate process of lower priority than the workers.

The supervisor sends the names of the snapshot files to this process through a pair of sockets, and never waits for it.
If snapshots arrive faster than they can be evaluated, files of up to `BACKLOG` bytes wait; ticks beyond that are
counted, but not evaluated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import shutil
import socket
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Thread

import msgspec
import numpy as np

from flockstep.arrays.memory import release
from flockstep.arrays.schema import FlatArray
from flockstep.errors import FlockstepError, RunError, in_short, of_kind
from flockstep.frameworks.base import Engine
from flockstep.launchers.children import Child, fork, how_it_ended, reap
from flockstep.launchers.entry import limit_process
from flockstep.messages import Address
from flockstep.partitions.split_facts import SplitFacts
from flockstep.records.config import RunConfig
from flockstep.records.events import ResultEvent
from flockstep.records.folder import EventWriter, RunFolder
from flockstep.records.snapshots import LAST, SNAPSHOTS, Snapshot
from flockstep.runtime.plan import Plan
from flockstep.runtime.setup import BuiltJob, prepare
from flockstep.runtime.signals import leave_to_supervisor
from flockstep.runtime.snapshot_tracker import SnapshotTick, SnapshotTracker
from flockstep.workloads.own_data import OwnData

BACKLOG = 1 << 30
"""Largest number of bytes of snapshots that may wait for their evaluation."""
YIELD = 10
"""Niceness of the evaluating process while workers train (on Linux); a worker on the same core then gets nine tenths of
the core.
"""


class SnapshotHandler:
    """Receives the snapshots of a run for evaluation. This base class evaluates nothing."""

    def take(self, item: Snapshot) -> None:
        """Handle a snapshot that a node has sent."""

    def lose(self, address: Address) -> None:
        """Handle the loss of a node, whose snapshots will no longer arrive."""

    def go_on(self) -> None:
        """Send to the evaluating process the messages that it could not accept earlier, without waiting."""


class SnapshotMessage(msgspec.Struct, omit_defaults=True):
    """Message to the evaluating process: a snapshot is stored, a node is lost, or the run has ended."""

    item: Snapshot | None = None
    lost: int | None = None
    ended: bool = False


class EvaluationOutcome(msgspec.Struct):
    """Final answer of the evaluating process: the error of the evaluation, if there was an error."""

    kind: str = ""
    reason: str = ""
    trace: str = ""


class Evaluator(SnapshotHandler):
    """Sends snapshots to the evaluating process, which starts with the first snapshot."""

    def __init__(self, record: Path, threads: int, own: OwnData | None = None, split: SplitFacts | None = None):
        """`own`: the test set, in place of the job's; `split`: what the launcher has found of a split model."""
        self.skipped: set[float] = set()
        self._arguments = str(record), threads, own, split
        self._child: Child | None = None
        self._feed: socket.socket
        self._unsent = bytearray()
        self._waiting: list[Snapshot] = []
        self._seen: set[float] = set()

    def take(self, item: Snapshot) -> None:
        """Send a snapshot to the evaluating process, unless its backlog is full."""
        if self._child is None:
            self._feed, theirs = socket.socketpair()
            self._feed.setblocking(False)
            with theirs:
                self._child = fork(evaluate, (*self._arguments, theirs))
        if item.tick is not None and item.tick != LAST:
            if item.tick not in self._seen and self._full():
                self.skipped.add(item.tick)
            self._seen.add(item.tick)
            if item.tick in self.skipped:
                item.remove()
                return
            self._waiting.append(item)
        self._tell(SnapshotMessage(item=item))

    def pending(self) -> list[Snapshot]:
        """Snapshots of the ticks of progress that have not been evaluated yet."""
        self._waiting = [item for item in self._waiting if Path(item.path).exists()]
        return self._waiting

    def lose(self, address: Address) -> None:
        """Tell the evaluating process that a node is lost, so that it stops waiting for the node."""
        self._tell(SnapshotMessage(lost=address))

    def go_on(self) -> None:
        """Send the messages that the evaluating process has not accepted yet."""
        if self._child is not None and self._unsent:
            with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                del self._unsent[: self._feed.send(self._unsent)]

    def finish(self) -> FlockstepError | None:
        """Tell the evaluating process that the run has ended, wait for it, and return the exception with which an
        evaluation failed, or None.
        """
        if self._child is None:
            return None
        self._tell(SnapshotMessage(ended=True))
        self._feed.setblocking(True)
        said = b""
        try:
            with contextlib.suppress(OSError):  # the process may have exited already
                self._feed.sendall(self._unsent)
            with contextlib.suppress(OSError):
                while chunk := self._feed.recv(1 << 16):
                    said += chunk
        except BaseException:  # a second request to end
            self._child.kill()
            raise
        finally:
            self._feed.close()
        reap([self._child], None)
        if not said:
            how = how_it_ended(self._child.exit_code() or 0)
            return RunError(f"the process that evaluates the model {how}; the evaluations in the record are incomplete")
        outcome = msgspec.json.decode(said, type=EvaluationOutcome)
        return of_kind(outcome.kind, outcome.reason, f"In the evaluation:\n{outcome.trace}") if outcome.kind else None

    def _tell(self, message: SnapshotMessage) -> None:
        self._unsent += msgspec.json.encode(message) + b"\n"
        self.go_on()

    def _full(self) -> bool:
        if sum(item.nbytes for item in self._waiting) > BACKLOG:
            self.pending()
        return sum(item.nbytes for item in self._waiting) > BACKLOG


def evaluate(folder: str, threads: int, own: OwnData | None, split: SplitFacts | None, feed: socket.socket) -> None:
    """Entry point of the evaluating process: evaluate snapshots until the supervisor reports the end of the run or
    dies.
    """
    leave_to_supervisor()
    limit_process(threads)
    outcome = EvaluationOutcome()
    try:
        _evaluate(RunFolder(folder), own, split, feed)
    except FlockstepError as error:
        outcome = _said(error, error)
    except Exception as error:  # noqa: BLE001 - of the job's loss or metric
        outcome = _said(RunError(f"the evaluation raised {in_short(error)}"), error)
    with contextlib.suppress(OSError):
        feed.sendall(msgspec.json.encode(outcome))


def _said(error: FlockstepError, cause: Exception) -> EvaluationOutcome:
    return EvaluationOutcome(type(error).__name__, str(error), "".join(traceback.format_exception(cause)))


def _built(config: RunConfig, own: OwnData | None, split: SplitFacts | None) -> tuple[Engine, Plan]:
    """Build the job; a model that the launcher has cut is neither cut nor compared with its parts again."""
    if split is not None and not split.obstacle:
        split = dataclasses.replace(split, obstacle="this process evaluates the whole model")
    engine, plan, _ = prepare(config, own, BuiltJob.of(config, own, split))
    release()
    return engine, plan


def _lower() -> None:
    """Lower the priority of the calling thread, so that the workers come first."""
    if hasattr(os, "setpriority"):
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), YIELD)


def _evaluate(record: RunFolder, own: OwnData | None, split: SplitFacts | None, feed: socket.socket) -> None:
    with ThreadPoolExecutor(1, "flockstep-build", _lower) as builder:
        engine, plan = builder.submit(_built, record.read_config(), own, split).result()

    def keep(tick: SnapshotTick, params: FlatArray) -> None:
        record.write_result(*engine.as_saved(params))
        events.write(ResultEvent(tick.t, tick.steps / tick.workers, tick.workers))

    with EventWriter(record.node_events_file(None)) as events:
        desk = _Desk(SnapshotTracker(engine, plan, events.write, keep))
        meanwhile = Thread(target=desk.work, args=(True,))
        meanwhile.start()
        ended = desk.listen(feed)
        meanwhile.join()
        desk.finish(ended)
        if not ended:
            shutil.rmtree(record.path / SNAPSHOTS, ignore_errors=True)  # the supervisor is gone and cannot remove it
    if desk.errors:
        raise desk.errors[0]


@dataclass
class _Desk:
    """Queue of the evaluating process; a thread of low priority handles it until the workers have ended."""

    tracker: SnapshotTracker
    errors: list[Exception] = field(default_factory=list)
    messages: queue.SimpleQueue[SnapshotMessage | None] = field(default_factory=queue.SimpleQueue)
    over: bool = False
    newest_only: bool = False

    def listen(self, feed: socket.socket) -> bool:
        """Receive the supervisor's messages until the end.

        Return whether the supervisor reported the end of the run.
        """
        try:
            for line in feed.makefile("rb"):
                message = msgspec.json.decode(line, type=SnapshotMessage)
                if message.ended:
                    return True
                self.messages.put(message)
            return False
        finally:
            self.over = True
            self.messages.put(None)

    def work(self, yields: bool) -> None:
        """Handle the messages in the queue.

        If it `yields`, the calling thread gets a lower priority, and stops when the run is over.
        """
        if yields:
            _lower()
        while not (yields and self.over) and (message := self.messages.get()) is not None:
            self.attempt(partial(self._act, message))

    def finish(self, ended: bool) -> None:
        """Choose the result. If the supervisor died (`ended` is false), only the newest snapshots are evaluated."""
        self.newest_only = not ended
        self.messages.put(None)  # the thread may have taken the first
        self.work(False)  # the workers have ended
        self.attempt(self.tracker.end)
        if ended:
            self.attempt(self.tracker.close)

    def attempt(self, what: Callable[[], None]) -> None:
        """Call `what` and keep its error for the end: the result is stored even if the job's metric fails."""
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # a model that diverged says so in its loss
                what()
        except Exception as error:  # noqa: BLE001 - of the job's loss or metric
            self.errors.append(error)

    def _act(self, message: SnapshotMessage) -> None:
        if message.item is not None and not (self.newest_only and message.item.tick not in (None, LAST)):
            self.tracker.add_snapshot(message.item)
        if message.lost is not None:
            self.tracker.lose(message.lost)
