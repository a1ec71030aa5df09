"""Evaluates model snapshots during training, in a separate process of lower priority than the workers.

The supervisor sends the names of the snapshot files to this process through a pipe, and never waits for it.
If snapshots arrive faster than they can be evaluated, files of up to `BACKLOG` bytes wait; ticks beyond that are
counted, but not evaluated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from flockstep.arrays.memory import release
from flockstep.arrays.schema import FlatArray
from flockstep.errors import FlockstepError, RunError, in_short, of_kind
from flockstep.launchers.children import Child, fork, how_it_ended, reap
from flockstep.launchers.entry import limit_process
from flockstep.messages import Address
from flockstep.partitions.split_facts import SplitFacts
from flockstep.records.config import RunConfig
from flockstep.records.events import ResultEvent
from flockstep.records.folder import EventWriter, RunFolder
from flockstep.records.snapshots import LAST, SNAPSHOTS, Snapshot
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

ToEvaluate = Snapshot | Address | RunConfig
"""What the evaluating process is told: a node's snapshot, the loss of a node, or how the run goes on."""


class SnapshotHandler:
    """Receives the snapshots of a run for evaluation. This base class evaluates nothing."""

    @property
    def notes(self) -> list[str]:
        """Sentences about the evaluations, for the record."""
        return []

    def pending(self) -> list[Snapshot]:
        """Return the snapshots of the ticks of progress that have not been evaluated yet."""
        return []

    def finish(self) -> FlockstepError | None:
        """Wait until all snapshots are evaluated; return the error with which an evaluation failed, or None."""
        return None

    def go_on(self, config: RunConfig) -> None:
        """Handle snapshots of other workers from now on, with which the run goes on by this configuration."""

    def close(self) -> None:
        """End the evaluating process if it still runs, because the run's record is lost."""

    def take(self, item: Snapshot) -> None:
        """Handle a snapshot that a node has sent."""

    def lose(self, address: Address) -> None:
        """Handle the loss of a node, whose snapshots will no longer arrive."""


class Evaluator(SnapshotHandler):
    """Sends snapshots to the evaluating process, which starts with the first snapshot."""

    def __init__(self, record: Path, threads: int, own: OwnData | None = None, split: SplitFacts | None = None):
        """`own`: the test set, in place of the job's; `split`: what the launcher has found of a split model."""
        self.skipped: set[float] = set()
        self._skipped = 0
        """Number of evaluations that were skipped before the workers last changed."""
        self._arguments = str(record), threads, own, split
        self._child: Child | None = None
        # Two pipes, so that an answer can be read even if messages were not.
        (self._their_feed, self._feed), (self._answer, self._their_answer) = Pipe(duplex=False), Pipe(duplex=False)
        self._sender = ThreadPoolExecutor(1, "flockstep-evaluation")
        """Thread that waits where the pipe is full, because the supervisor never does."""
        self._waiting: list[Snapshot] = []
        self._seen: set[float] = set()

    @property
    def notes(self) -> list[str]:
        """A sentence about the evaluations that were skipped, if there are any."""
        count = self._skipped + len(self.skipped)
        text = (
            f"{count} evaluations were skipped because snapshots arrived faster than the model could be "
            "evaluated; raise evaluate_every to evaluate less often"
        )
        return [text] if count else []

    def close(self) -> None:
        self._sender.shutdown(wait=False, cancel_futures=True)
        if self._child is not None and self._child.exit_code() is None:
            self._child.kill()

    def take(self, item: Snapshot) -> None:
        """Send a snapshot to the evaluating process, unless its backlog is full."""
        if self._child is None:
            with self._their_feed, self._their_answer:
                self._child = fork(evaluate, (*self._arguments, self._their_feed, self._their_answer))
        if item.tick is not None and item.tick != LAST:
            if item.tick not in self._seen and self._full():
                self.skipped.add(item.tick)
            self._seen.add(item.tick)
            if item.tick in self.skipped:
                item.remove()
                return
            self._waiting.append(item)
        self._sender.submit(self._feed.send, item)

    def _full(self) -> bool:
        if sum(item.nbytes for item in self._waiting) > BACKLOG:
            self.pending()
        return sum(item.nbytes for item in self._waiting) > BACKLOG

    def pending(self) -> list[Snapshot]:
        """Snapshots of the ticks of progress that have not been evaluated yet."""
        self._waiting = [item for item in self._waiting if Path(item.path).exists()]
        return self._waiting

    def lose(self, address: Address) -> None:
        """Tell the evaluating process that a node is lost, so that it stops waiting for the node."""
        self._sender.submit(self._feed.send, address)

    def go_on(self, config: RunConfig) -> None:
        self._skipped += len(self.skipped)  # ticks are counted anew
        self.skipped, self._seen, self._waiting = set(), set(), []
        if self._child is not None:  # it reads the record's configuration when it begins
            self._sender.submit(self._feed.send, config)

    def finish(self) -> FlockstepError | None:
        """Tell the evaluating process that the run has ended, wait for it, and return the exception with which an
        evaluation failed, or None.
        """
        if self._child is None:
            return None
        self._sender.submit(self._feed.send, None)
        try:
            outcome = self._answer.recv()
        except (EOFError, OSError):
            outcome = None
        except BaseException:  # a second request to end
            self._child.kill()
            raise
        finally:
            self._sender.shutdown(wait=False, cancel_futures=True)
            self._answer.close()
        reap([self._child], None)
        if outcome is None:
            how = how_it_ended(self._child.exit_code() or 0)
            return RunError(f"the process that evaluates the model {how}; the evaluations in the record are incomplete")
        kind, reason, trace = outcome
        return of_kind(kind, reason, f"In the evaluation:\n{trace}") if kind else None


def evaluate(
    folder: str, threads: int, own: OwnData | None, split: SplitFacts | None, feed: Connection, answer: Connection
) -> None:
    """Entry point of the evaluating process: evaluate snapshots until the supervisor reports the end of the run or
    dies, and answer with kind, reason and trace of the first error.
    """
    leave_to_supervisor()
    limit_process(threads)
    outcome = "", "", ""
    try:
        _evaluate(RunFolder(folder), own, split, feed)
    except Exception as error:  # noqa: BLE001 - of the job's loss or metric
        ours = error if isinstance(error, FlockstepError) else RunError(f"the evaluation raised {in_short(error)}")
        outcome = type(ours).__name__, str(ours), "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError):
        answer.send(outcome)


def _evaluate(record: RunFolder, own: OwnData | None, split: SplitFacts | None, feed: Connection) -> None:
    config = record.read_config()

    def build() -> BuiltJob:
        # A model that the launcher has cut is neither cut nor compared with its parts again.
        facts = split
        if split is not None and not split.obstacle:
            facts = dataclasses.replace(split, obstacle="this process evaluates the whole model")
        return BuiltJob.of(config, own, facts)

    meanwhile = ThreadPoolExecutor(1, "flockstep-evaluation", _lower)
    built = meanwhile.submit(build).result()
    with EventWriter(record.node_events_file(None)) as events:

        def tracker(config: RunConfig) -> SnapshotTracker:
            engine, plan, _ = prepare(config, own, built)
            release()

            def keep(tick: SnapshotTick, params: FlatArray, buffers: dict[str, FlatArray]) -> None:
                record.write_result(*engine.as_saved(params), buffers=buffers)
                events.write(ResultEvent(tick.t, tick.steps / tick.workers, tick.workers))

            return SnapshotTracker(engine, plan, events.write, keep)

        evaluation = SnapshotEvaluation(tracker, config)
        messages: deque[tuple[ToEvaluate, Future[None]]] = deque()
        ended = False
        with contextlib.suppress(EOFError, OSError):  # the supervisor is gone
            while (message := feed.recv()) is not None:
                messages.append((message, meanwhile.submit(evaluation.handle, message)))
                while messages and messages[0][1].done():
                    messages.popleft()
            ended = True
        # The workers have ended: what is left is evaluated at the usual priority, to which a thread cannot return.
        rest = [message for message, future in messages if future.cancel()]
        meanwhile.shutdown()
        evaluation.finish(rest, ended)
        if not ended:
            shutil.rmtree(record.path / SNAPSHOTS, ignore_errors=True)  # the supervisor cannot remove it
    if evaluation.errors:
        raise evaluation.errors[0]


def _lower() -> None:
    """Lower the priority of the calling thread, so that the workers come first."""
    if hasattr(os, "setpriority"):
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), YIELD)


class SnapshotEvaluation:
    """Evaluates snapshots, and keeps errors for the end: the result is stored even if the job's metric fails."""

    def __init__(self, tracker: Callable[[RunConfig], SnapshotTracker], config: RunConfig):
        """`tracker` makes what evaluates the snapshots of a run with this configuration."""
        self.errors: list[Exception] = []
        self._make, self._tracker = tracker, tracker(config)

    def handle(self, message: ToEvaluate) -> None:
        """Evaluate what a snapshot completes, or no longer wait for a lost node, or for any node of the run before."""
        if isinstance(message, Snapshot):
            self._attempt(partial(self._tracker.add_snapshot, message))
        elif isinstance(message, RunConfig):
            self._tracker.give_up()
            self._tracker = self._make(message)
        else:
            self._attempt(partial(self._tracker.lose, message))

    def finish(self, rest: Iterable[ToEvaluate], ended: bool) -> None:
        """Handle the rest of the messages, and choose the result. If the supervisor died (`ended` is false), only the
        newest snapshots are evaluated.
        """
        for message in rest:
            if ended or not isinstance(message, Snapshot) or message.tick in (None, LAST):
                self.handle(message)
        self._attempt(self._tracker.end)
        if ended:
            self._attempt(self._tracker.close)

    def _attempt(self, what: Callable[[], None]) -> None:
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # a model that diverged says so in its loss
                what()
        except Exception as error:  # noqa: BLE001 - of the job's loss or metric
            self.errors.append(error)
