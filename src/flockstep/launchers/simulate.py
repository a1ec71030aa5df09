"""Runs a job in virtual time and writes its record."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path

from flockstep.launchers.completion import finished
from flockstep.launchers.threads import limit_threads
from flockstep.records.config import RunConfig
from flockstep.records.events import EvaluationEvent, Event, HostsEvent
from flockstep.records.folder import EventWriter, RunFolder
from flockstep.records.summary import Summary, reaches
from flockstep.runtime.runner import reporting_users_errors
from flockstep.runtime.setup import prepare
from flockstep.runtime.virtual import Simulation
from flockstep.runtime.virtual_split import SplitSimulation
from flockstep.simulation.compute import ComputeModel
from flockstep.simulation.faults import Fault
from flockstep.simulation.network import Network


def simulate(
    config: RunConfig,
    folder: Path,
    progress: Callable[[int, int, float], None] = lambda done, all_steps, t: None,
    overwrite: bool = False,
) -> Summary:
    """Simulate a run in virtual time, and write its record.

    Args:
        config: the run's configuration, with `kind="simulate"`.
        folder: folder of the record; created if it is missing.
        progress: called with the steps done by all workers, the total number of steps, and the virtual seconds.
        overwrite: replace the run that the folder holds.

    Returns:
        The summary of the record.

    Raises:
        ConfigurationError: the configuration is invalid; nothing was started.
        RunError: the run failed; the record is complete up to the failure, and its summary names the reason.
    """
    limit_threads(config.threads or 1)
    engine, plan, config = prepare(config)
    limit_threads(config.threads or 1)  # also the libraries that the job has imported
    network, compute = Network.parse(str(config.network)), ComputeModel.parse(str(config.compute))
    faults = [Fault.parse(fault) for fault in config.faults]
    config = dataclasses.replace(config, versions={**config.versions, "gradients": engine.batching})
    record = RunFolder(folder)
    every_step = plan.steps * config.workers
    with (
        record.created(config, overwrite),
        finished(record, config),
        EventWriter(record.node_events_file(None), flush_every=4096) as events,
    ):
        if len(hosts := network.hosts(config.workers)) > 1:
            events.write(HostsEvent(0.0, hosts))

        def heard(event: Event) -> None:
            events.write(event)
            if config.until_target and isinstance(event, EvaluationEvent) and reaches(config, event.metric):
                raise _TargetReached

        def shown(done: int, t: float) -> None:
            progress(done, every_step, t)

        run: Simulation | SplitSimulation
        if plan.split is not None:
            run = SplitSimulation(plan.split, plan, compute, network, heard, shown)
        else:
            run = Simulation(engine, plan, compute, network, heard, shown, faults=faults)
        with reporting_users_errors(), contextlib.suppress(_TargetReached):
            run.run()
        run.stop()
        record.check_whole([None])
        if run.tracker.result is not None:
            record.write_result(*engine.as_saved(run.tracker.result), buffers=run.tracker.buffers)
        run.close()
    return record.read_summary()


class _TargetReached(Exception):
    """Raised after the evaluation that reaches the target, to end the run."""
