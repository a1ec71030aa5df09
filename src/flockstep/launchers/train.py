"""Real training of a declared job on processes of this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from flockstep.drivers.account import Emit
from flockstep.drivers.member import Hello, Ticket, in_short
from flockstep.drivers.plan import Plan
from flockstep.drivers.setup import prepare
from flockstep.drivers.tracker import Tracker
from flockstep.errors import Diverged, FlockstepError, Interrupted, RunError
from flockstep.expression import from_data
from flockstep.frameworks.base import Engine
from flockstep.launchers.children import Child, fork
from flockstep.launchers.entry import server_main, worker_main
from flockstep.launchers.standing import Standing
from flockstep.launchers.supervisor import Outcome, Supervisor
from flockstep.messages import Address
from flockstep.optimizers.base import Optimizer
from flockstep.records.config import RunConfig
from flockstep.records.events import Event, Snapshot
from flockstep.records.folder import EventWriter, RunFolder
from flockstep.records.summary import Status, Summary, reaches, summarise
from flockstep.transports.base import Transport

HEARTBEAT = 5.0
"""Seconds of silence after which a stopped process counts as lost, unless told otherwise."""

Show = Callable[[dict[Address, Standing]], None]


def train(config: RunConfig, folder: Path, show: Show = lambda standings: None) -> Summary:
    """Train on `config.workers` processes; return the summary of the record in `folder`.

    A script guards the call, since the processes that it starts import the script again:

        if __name__ == "__main__":
            train(RunConfig(kind="train", job="softmax", strategy="all_reduce", workers=2), Path("runs/mine"))

    Raises:
        ConfigurationError: before anything starts, for input that no run could work with.
        RunError: the run failed; the record is complete up to then, its summary says why.
    """
    engine, plan, config = prepare(config)
    record = RunFolder(folder)
    record.create(config)
    every = plan.evaluate_every

    def start_worker(ticket: Ticket) -> Child:
        return fork(worker_main, (ticket, config.threads or 1))

    def start_server(ticket: Ticket, index: int, hello: Hello) -> Child:
        optimizer = str(from_data(hello.optimizer, Optimizer))  # type: ignore[type-abstract]
        return fork(server_main, (ticket, index, hello.strategy, optimizer, hello.schema, every, config.imports))

    supervisor = Supervisor(
        config.workers,
        Transport.parse(config.transport or "shared_memory"),
        config.heartbeat or HEARTBEAT,
        record.path.resolve(),
        start_worker,
        start_server,
        show,
        step_timeout=config.step_timeout,
    )
    with finished(record, config):
        outcome = supervisor.run()
        with np.errstate(over="ignore", invalid="ignore"):  # a model that diverged says so in its loss
            settle(record, engine, plan, outcome)
        if outcome.error is not None:
            raise outcome.error
    return record.read_summary()


def settle(record: RunFolder, engine: Engine, plan: Plan, outcome: Outcome) -> None:
    """Evaluate what was handed in and complete the record.

    Raises:
        RunError: the evaluation itself failed.
    """
    with EventWriter(record.node_events_file(None)) as events:
        held = plan.held(engine.schema.size)
        tracker = Tracker(engine, plan.result, plan.cluster, held, plan.samples_at, events.write)
        try:
            for item in sorted(outcome.handed_in, key=lambda item: item.tick):
                if item.buffers is not None:
                    engine.restore_buffers(item.address, item.buffers)
                tracker.add(item.tick, item.address, item.params, item.t, item.step, item.sent)
            for lost in outcome.lost.values():
                events.write(lost)
                tracker.lose(lost.node)
            tracker.close()
        except FlockstepError:
            raise
        except Exception as error:  # of the job's loss or metric
            raise outcome.error or RunError(f"the evaluation raised {in_short(error)}") from error
    if tracker.result is not None:
        record.write_result(tracker.result, engine.schema)


class TargetReached(Exception):
    """An evaluation has reached the target of a run that ends there."""


def until_target(config: RunConfig, emit: Emit) -> Emit:
    """Write events by `emit`; raise `TargetReached` after the first evaluation that reaches the target."""

    def heard(event: Event) -> None:
        emit(event)
        if isinstance(event, Snapshot) and reaches(config, event.metric):
            raise TargetReached

    return heard


@contextlib.contextmanager
def finished(record: RunFolder, config: RunConfig) -> Iterator[None]:
    """Around a run: whatever happens, its record gets a summary that says so."""
    status: Status = "failed"
    text = None
    try:
        yield
        status = "finished"
    except (KeyboardInterrupt, Interrupted) as error:
        status, text = "interrupted", str(error) or "interrupted"
        raise
    except Exception as error:
        status, text = "diverged" if isinstance(error, Diverged) else "failed", str(error)
        raise
    finally:
        record.write_summary(summarise(config, record.merge_events(), status, text))
