"""Completes the record of a run that has ended: its result and its summary."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from flockstep.arrays.schema import FlatArray
from flockstep.errors import Diverged, FlockstepError, Interrupted
from flockstep.launchers.signals import undisturbed
from flockstep.records import owner
from flockstep.records.config import RunConfig
from flockstep.records.events import EvaluationEvent, Event, ResultEvent
from flockstep.records.folder import EventWriter, RunFolder
from flockstep.records.summary import Status, reaches, summarize
from flockstep.runtime.node_metrics import Emit
from flockstep.runtime.snapshot_tracker import SnapshotTick
from flockstep.strategies.base import ResultPolicy

if TYPE_CHECKING:  # a simulation needs no sockets
    from flockstep.launchers.evaluation import Evaluator
    from flockstep.launchers.peers import Outcome


def settle(record: RunFolder, evaluation: Evaluator, policy: ResultPolicy, outcome: Outcome) -> FlockstepError | None:
    """Wait until all snapshots are evaluated, and complete the record; return the reason if the run has failed."""
    try:
        error = evaluation.finish()
    finally:
        owner.check(record.path)
        with EventWriter(record.node_events_file(None)) as events:
            for event in outcome.events:
                events.write(event)
        if not record.result_file.exists():  # the evaluation did not finish
            with first_error(outcome):
                keep_newest(record, policy, outcome)
    return outcome.error or error


@contextlib.contextmanager
def first_error(outcome: Outcome) -> Iterator[None]:
    """Context manager around writing the record of a run that has ended: where the disk does not take the files, the
    error that has ended the run is raised, because it says more.
    """
    try:
        yield
    except OSError:
        if outcome.error is None:
            raise
        raise outcome.error from None


def keep_newest(record: RunFolder, policy: ResultPolicy, outcome: Outcome) -> None:
    """Write the newest snapshots as the run's result, selected by `policy` without an evaluation."""
    parts = max(1, len(outcome.sizes))
    tick = outcome.newest.tick({node // parts if node >= 0 else node for node in outcome.lost})
    params = newest_model(tick, policy, outcome)
    if params is not None and outcome.schema is not None:
        record.write_result(params, outcome.schema)
        with EventWriter(record.node_events_file(None)) as events:
            events.write(ResultEvent(tick.t, tick.steps / tick.workers, tick.workers))


def newest_model(tick: SnapshotTick, policy: ResultPolicy, outcome: Outcome) -> FlatArray | None:
    """Return the model that a policy selects from the newest snapshots; None if there are no snapshots."""
    if not tick.workers or outcome.strategy is None or outcome.schema is None:
        return None
    return tick.model(policy, outcome.held)


class TargetReached(Exception):
    """Raised after the evaluation that reaches the target, to end the run."""


def until_target(config: RunConfig, emit: Emit) -> Emit:
    """Return a function that passes events to `emit`, and raises `TargetReached` after the first evaluation that
    reaches the target.
    """

    def heard(event: Event) -> None:
        emit(event)
        if isinstance(event, EvaluationEvent) and reaches(config, event.metric):
            raise TargetReached

    return heard


@contextlib.contextmanager
def finished(record: RunFolder, config: RunConfig) -> Iterator[list[str]]:
    """Context manager around a run that writes a summary, with the run's status and notes, to the record however the
    run ends.
    """
    status: Status = "failed"
    text, notes = None, list[str]()
    try:
        yield notes
        status = "finished"
    except (KeyboardInterrupt, Interrupted) as error:
        status, text = "interrupted", str(error) or "interrupted"
        raise
    except Exception as error:
        status, text = "diverged" if isinstance(error, Diverged) else "failed", str(error)
        raise
    finally:
        if owner.is_ours(record.path):
            with undisturbed():
                try:
                    record.write_summary(summarize(config, record.merge_events(), status, text, notes))
                except OSError:
                    if status == "finished":
                        raise  # otherwise the error that has ended the run is told
